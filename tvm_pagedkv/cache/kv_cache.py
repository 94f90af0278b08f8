# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the runtime object with keyword arguments; each method is one global function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tvm_ffi

from .._functions import CACHE, STATE, as_int, as_shape, global_function
from .files import CacheFiles
from .prefix_lookup import as_tokens


@tvm_ffi.register_object("pagedkv.KVCache")
class KVCache(CacheFiles, tvm_ffi.Object):
    """A paged KV cache.

    Create one with `tvm_pagedkv.create`, `Bundle.create`, the global function ``pagedkv.create`` or
    a Relax VM. It is a TVM object: every ``vm.builtin.kv_state_*`` and
    ``vm.builtin.attention_kv_cache_*`` function accepts it.

    Tensor arguments are TVM tensors, NumPy arrays (bfloat16 through ml_dtypes) or objects with
    ``__dlpack__``. NumPy arrays and tensors that are not contiguous are copied. In shapes, T is the
    number of rows of the step: the sum of its append lengths.

    A call that raises changes nothing.

    ``len(cache)`` is the number of sequences, and ``seq_id in cache`` tells whether one exists.

    Attributes
    ----------
    model_name : str
        The weights and types that K and V come from, if a `DecoderModel` has made the cache.

    Notes
    -----
    A cache may be used from any thread, but only from one at a time: a call that arrives while
    another thread is inside raises a RuntimeError. Caches are independent of each other. On a GPU,
    the calls of a cache take effect in program order, whatever stream each of them is on.
    """

    __slots__ = ("__dict__",)

    model_name = ""

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
        about = f"{len({layer['id'] for layer in self._kept_layers})} layers"
        try:
            stats = self.stats()
        except RuntimeError:  # another thread is inside
            return f"<KVCache: {about}, in use by another thread>"
        return (
            f"<KVCache: {about}, {stats['num_sequences']} sequences, {stats['total_tokens']} "
            f"tokens, {stats['num_used_pages']} of {stats['num_pages']} pages in use>"
        )

    # --- sequences ------------------------------------------------------------------------------

    def remove_sequence(self, seq_id: int) -> None:
        """Remove a sequence. Its forks keep the pages that they share with it.

        Raises
        ------
        KeyError
            If there is no such sequence.
        """
        global_function(STATE + "remove_sequence")(self, as_int("seq_id", seq_id))

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        """Add a sequence that shares the first positions of another one, without a copy.

        A shared page is copied when one of its owners writes to it.

        Parameters
        ----------
        parent_id, child_id : int
            An existing sequence, and an id that is not in use.
        fork_pos : int
            Number of positions to share, up to the parent's length; -1: all.

        Raises
        ------
        KeyError
            If there is no sequence `parent_id`.
        ValueError
            If `child_id` is in use, `fork_pos` is out of range, or a layer's window at that
            position needs pages that have been reclaimed.
        """
        ids = as_int("parent_id", parent_id), as_int("child_id", child_id)
        global_function(STATE + "fork_sequence")(self, *ids, as_int("fork_pos", fork_pos))

    def pop_n(self, seq_id: int, n: int) -> None:
        """Drop the last `n` positions of a sequence.

        In layers with a window, the last 16 positions can always be popped; more can be popped
        unless the pages that the window then needs have been reclaimed.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If `n` is negative or too large.
        """
        global_function(STATE + "popn")(self, as_int("seq_id", seq_id), as_int("n", n))

    def clear(self) -> None:
        """Remove all sequences and free all cached pages.

        The tiers of a `prefix_cache` keep what they have; `forget_prefixes` forgets it.
        """
        global_function(STATE + "clear")(self)

    def enable_sliding_window(self, seq_id: int, window: int, sinks: int = 0) -> None:
        """Limit a sequence to a sliding window with attention sinks.

        The sequence keeps `window` positions: the first `sinks` ones and the most recent ones. A
        row sees the sinks and the window that ends at it, however the input is chunked.
        Positions that leave the window are dropped when a step ends, or at once if the sequence is
        longer than the window. After that, `sequence_length` and all positions count only what is
        kept.

        Layers with a window of their own ignore this one, and states of recurrent layers are those
        of the whole text. A fork has no window until this method is
        called for it, with the same number of sinks if the parent has dropped positions.

        Parameters
        ----------
        seq_id : int
        window : int
            Number of positions to keep, the sinks included.
        sinks : int
            Number of leading positions to keep, at least 0.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If the cache was made without ``sliding_window`` or has MLA layers or index lanes, if
            the sequence has a window, or if a number is out of range. A window that includes the
            row itself needs at least ``sinks + 2`` positions.

        Notes
        -----
        ``KVCacheConfig.sliding_window_includes_self`` says whether a row counts as one of the
        `window` positions that it sees. By default it does with RoPE mode "normal" only.

        With modes "normal" and "none", rotations and `query_positions` count every position ever
        appended. With mode "inline", rotations count positions within what the row sees, as
        StreamingLLM does (https://arxiv.org/abs/2309.17453).
        """
        arguments = as_int("seq_id", seq_id), as_int("window", window), as_int("sinks", sinks)
        global_function(CACHE + "enable_sliding_window_for_seq")(self, *arguments)

    # --- the step -------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        spans: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """Begin a step that appends `append_lengths[i]` rows to sequence `seq_ids[i]`.

        Parameters
        ----------
        seq_ids : sequence of int
            Distinct ids, at most ``max_num_sequences``.
        append_lengths : sequence of int
            Number of rows per sequence, each at least 1; at most ``prefill_chunk_size`` in total.
        token_tree_parents : sequence of int, optional
            For each row, its parent in the token tree of its sequence: an index among all
            uncommitted nodes of that sequence, or -1 for a root. Finish with `commit_tree`.
        tokens : sequence of int, optional
            The token id of each row, so that `add_sequence` finds these pages once the step has
            ended. The tokens of all positions before them must be recorded, and the rows must not
            be nodes of token trees or in spans.
        spans : sequence of (int, int, int), optional
            Spans ``(sequence, begin, end)`` whose rows see to the end of their span, as the tokens
            of an image or of the prefix of a prefix-LM do. `begin` and `end` count from the start
            of the sequence, and a span lies within the step. Needs ``KVCacheConfig(spans=True)``.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If ids repeat, a length or the total is out of range, or the tree, `tokens` or `spans`
            are invalid.
        CacheFullError
            If too few pages are available.
        """
        ids, lengths = as_shape("seq_ids", seq_ids), as_shape("append_lengths", append_lengths)
        tree = token_tree_parents
        if tree is not None:
            tree = as_shape("token_tree_parents", tree)
        recorded = None if tokens is None else as_tokens(tokens)
        if spans is None:
            global_function(STATE + "begin_forward")(self, ids, lengths, tree)
        elif tree is not None:
            raise ValueError("a step has token_tree_parents or spans, not both")
        else:
            flat = as_shape("spans", [number for span in spans for number in span])
            global_function("pagedkv.begin_forward_with_spans")(self, ids, lengths, flat)
        if recorded is None:
            return
        try:
            global_function("pagedkv.prefix_record_step")(self, recorded)
        except BaseException:
            self.abort_forward()
            raise

    def end_forward(self) -> None:
        """End the step.

        Unlike `forward`, it does not require that every layer has run. Rows that a layer left out
        stay in their sequence, but they are never found by their tokens, sent, stored or saved.

        Raises
        ------
        ValueError
            If no step has begun.
        """
        global_function(STATE + "end_forward")(self)

    def abort_forward(self) -> None:
        """Undo `begin_forward` and the appends of the step.

        Lengths, pages, token trees, windows and transfers are as before the step, and no rows are
        offered to receivers.

        Raises
        ------
        ValueError
            If no step has begun.
        """
        global_function("pagedkv.abort_forward")(self)

    @contextlib.contextmanager
    def forward(
        self,
        seq_ids: Sequence[int],
        append_lengths: Sequence[int],
        token_tree_parents: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        spans: Sequence[tuple[int, int, int]] | None = None,
    ) -> Iterator[KVCache]:
        """Run a step as a context manager: `begin_forward` on entry, `end_forward` on exit.

        An exception inside it or at its end, including KeyboardInterrupt, aborts the step
        (`abort_forward`).

        Parameters
        ----------
        seq_ids, append_lengths, token_tree_parents, tokens, spans
            As for `begin_forward`, and so are its errors.

        Yields
        ------
        KVCache
            This cache.

        Raises
        ------
        ValueError
            If a layer has not run: neither `attention` nor `self_attention` was called for it, or
            for an MLA layer `append_mla_kv`, for a recurrent one `recurrent` and, if it has one,
            `conv`. Its new slots hold no data, so the step is aborted.
        """
        self.begin_forward(seq_ids, append_lengths, token_tree_parents, tokens, spans)
        try:
            yield self
            missing = global_function("pagedkv.missing_layers")(self)
            if len(missing) > 0:
                raise ValueError(
                    f"the step was aborted: layers {list(missing)} of the cache were not run; "
                    "call attention once for every layer, or append_mla_kv, `recurrent` or `conv`"
                )
            self.end_forward()
        except BaseException:
            if self.is_in_forward:
                self.abort_forward()
            raise

    def commit_tree(self, seq_ids: Sequence[int], leaf_indices: Sequence[int]) -> None:
        """Keep one path of each sequence's token tree and drop the other nodes.

        Parameters
        ----------
        seq_ids : sequence of int
            Sequences with a token tree.
        leaf_indices : sequence of int
            For each sequence, the last node of the path, as an index among all of its uncommitted
            nodes; -1: drop the whole tree.

        Raises
        ------
        KeyError, ValueError
            If a sequence does not exist or has no such node, or a step is in progress.
        CacheFullError
            If a shared page must be copied and no page is available.
        """
        leaves = as_shape("leaf_indices", leaf_indices)
        ids = as_shape("seq_ids", seq_ids)
        global_function(CACHE + "commit_accepted_token_tree_nodes")(self, ids, leaves)
