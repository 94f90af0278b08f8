# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the runtime object with keywords; each method is one global function."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tvm_ffi

from .._deprecation import renamed_arguments
from .._functions import CACHE, STATE, as_int, as_shape, global_function
from . import checkpoint
from .attention import CacheAttention


@tvm_ffi.register_object("pagedkv.KVCache")
class KVCache(CacheAttention, tvm_ffi.Object):
    """A paged KV cache.

    Made by `tvm_pagedkv.create`, by ``pagedkv.create``, or by a Relax VM. It is a tvm object: every
    ``vm.builtin.kv_state_*`` and ``vm.builtin.attention_kv_cache_*`` function takes it.

    Tensor arguments are tvm tensors, NumPy arrays (bfloat16 by ml_dtypes) or anything with DLPack;
    NumPy arrays and tensors that are not contiguous are copied. T is the number of rows of the
    step: the sum of its append lengths. A call that raises has changed nothing.

    A cache may be used from any thread, but by one at a time: a call that comes while another
    thread is inside raises a RuntimeError and changes nothing. Caches are independent of each
    other. On a GPU the calls of a cache take effect in their order, whichever stream each is on.
    """

    __slots__ = ("__dict__",)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_ids())

    def __contains__(self, seq_id: object) -> bool:
        """Return whether a sequence has this id."""
        return seq_id in self.sequence_ids()

    def __bool__(self) -> bool:
        """Return True: a cache without sequences is a cache nonetheless."""
        return True

    def __repr__(self) -> str:
        """Return the cache's layers, sequences and pages in a line."""
        about = f"{len(self.description['layers'])} layers"
        try:
            stats = self.stats()
        except RuntimeError:  # another thread is inside
            return f"<KVCache: {about}, in use by another thread>"
        return (
            f"<KVCache: {about}, {stats['num_sequences']} sequences, {stats['total_tokens']} "
            f"tokens, {stats['num_used_pages']} of {stats['num_pages']} pages in use>"
        )

    # --- sequences ------------------------------------------------------------------------------

    def add_sequence(self, seq_id: int) -> None:
        """Add an empty sequence under any id that is not in use."""
        global_function(STATE + "add_sequence")(self, as_int("seq_id", seq_id))

    def remove_sequence(self, seq_id: int) -> None:
        """Remove a sequence; its forks keep what they share."""
        global_function(STATE + "remove_sequence")(self, as_int("seq_id", seq_id))

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        """Add `child_id`, which shares the first `fork_pos` positions of its parent (-1: all).

        A ValueError where pages that a layer's window would see there have been reclaimed.
        """
        ids = as_int("parent_id", parent_id), as_int("child_id", child_id)
        global_function(STATE + "fork_sequence")(self, *ids, as_int("fork_pos", fork_pos))

    def pop_n(self, seq_id: int, n: int) -> None:
        """Drop the last `n` positions of a sequence.

        Layers with a window let the last 16 positions be popped, and more unless the pages that
        they would see then have been reclaimed: a ValueError.
        """
        global_function(STATE + "popn")(self, as_int("seq_id", seq_id), as_int("n", n))

    def clear(self) -> None:
        """Remove all sequences and give up all cached pages."""
        global_function(STATE + "clear")(self)

    @renamed_arguments(sink="sinks")
    def enable_sliding_window(self, seq_id: int, window: int, sinks: int = 0) -> None:
        """Let a sequence keep `window` positions: its first `sinks` ones and its last ones.

        In any chunking, a row sees the sinks and the last positions. Positions that leave are
        dropped when a step ends, and those of a longer sequence at once; then `sequence_length`
        and every other position count what is held. Layers with a window of their own follow that
        one alone. A fork has no window until it is given one: with as many sinks, where positions
        have been dropped before the fork.

        With ``rope`` of mode "normal" or "none" the row is one of the `window` positions, and
        rotations and `query_positions` count all that was ever appended: without sinks this is the
        window of models such as Mistral. With mode "inline" the row sees itself and `window`
        positions besides, and rotations count within what it sees.

        Raises
        ------
        ValueError
            For a cache made without ``sliding_window`` or with MLA layers; a sequence that has a
            window; numbers out of range. Modes "normal" and "none" need a `window` of at least
            ``sinks + 2``.
        """
        arguments = as_int("seq_id", seq_id), as_int("window", window), as_int("sinks", sinks)
        global_function(CACHE + "enable_sliding_window_for_seq")(self, *arguments)

    # --- the step -------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
    ) -> None:
        """Begin a step that appends `append_lengths[i]` rows to sequence `seq_ids[i]`.

        Raises
        ------
        CacheFullError
            When there are too few free pages.
        """
        ids, lengths = as_shape("seq_ids", seq_ids), as_shape("append_lengths", append_lengths)
        tree = token_tree_parents
        if tree is not None:
            tree = as_shape("token_tree_parents", tree)
        global_function(STATE + "begin_forward")(self, ids, lengths, tree)

    def end_forward(self) -> None:
        """End the step.

        Unlike `forward` it does not ask whether every layer was attended to.
        """
        global_function(STATE + "end_forward")(self)

    def abort_forward(self) -> None:
        """End the step as if it had never begun.

        Lengths, pages, copies made for forks, token trees, windows and transfers are as before
        `begin_forward`; nothing is offered to receivers.

        Raises
        ------
        ValueError
            Outside a step.
        """
        global_function("pagedkv.abort_forward")(self)

    @contextlib.contextmanager
    def forward(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
    ) -> Iterator[KVCache]:
        """`begin_forward` and `end_forward` as a context manager.

        An exception within it, a KeyboardInterrupt too, aborts the step (`abort_forward`).

        Raises
        ------
        ValueError
            Where a layer of the cache was not attended to (`attention` or `self_attention`, of an
            MLA layer `append_mla_kv`): its pages would hold what lay there before. The step has
            been aborted.
        """
        self.begin_forward(seq_ids, append_lengths, token_tree_parents)
        try:
            yield self
            missing = global_function("pagedkv.missing_layers")(self)
            if len(missing) > 0:
                raise ValueError(
                    f"the step was aborted: layers {list(missing)} of the cache were not attended "
                    "to; call attention (append_mla_kv for MLA layers) once for every layer"
                )
        except BaseException:
            if self.is_in_forward():
                self.abort_forward()
            raise
        self.end_forward()

    def commit_tree(self, seq_ids: Sequence[int], leaf_indices: Sequence[int]) -> None:
        """Keep of each sequence's token tree the path to a leaf (-1: nothing)."""
        leaves = as_shape("leaf_indices", leaf_indices)
        ids = as_shape("seq_ids", seq_ids)
        global_function(CACHE + "commit_accepted_token_tree_nodes")(self, ids, leaves)

    # --- files ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike, seq_ids: Iterable[int] | None = None) -> None:
        """Write sequences to a file in the safetensors format; `load` reads it.

        Pages that sequences share are written once. The file appears under its name when it is
        whole, with a checksum for each layer; an older one is replaced. Only its owner may read it
        (mode 0600). It takes a few megabytes of memory beside the cache. Not within a step.

        Parameters
        ----------
        path : path
        seq_ids : ids, optional
            None: all sequences.
        """
        checkpoint.save(self, path, seq_ids)

    def load(
        self,
        path: str | os.PathLike,
        seq_ids: Mapping[int, int] | Iterable[int] | None = None,
    ) -> list[int]:
        """Add sequences of a file that `save` wrote: all of them or, where one fails, none.

        They share the pages that they shared when they were saved, and continue bit for bit as they
        would have. The cache may have another capacity and another device; what must agree is
        ``description["layout"]``: kinds, windows, heads, dimensions and rotation of the layers, the
        pages' size and dtype.

        Parameters
        ----------
        path : path
        seq_ids : mapping or ids, optional
            Ids in the file and the ids to give them, or ids that stay as they are; None: all.

        Returns
        -------
        ids of the new sequences

        Raises
        ------
        ValueError
            The file is damaged or of another layout; or an id is in use.
        KeyError
            The file has no such sequence.
        CacheFullError
            When there are too few free pages.
        """
        return checkpoint.load(self, path, seq_ids)
