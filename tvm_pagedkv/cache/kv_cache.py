# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the runtime object with keywords; each method is one global function."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi

from .._functions import CACHE, STATE, as_int, as_shape, global_function
from . import checkpoint
from .inspection import CacheInspection


@tvm_ffi.register_object("pagedkv.KVCache")
class KVCache(CacheInspection, tvm_ffi.Object):
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

    def enable_sliding_window(self, seq_id: int, window: int, sink: int = 0) -> None:
        """Let a sequence keep `window` positions: its first `sink` ones (at least 0) and its last.

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
            ``sink + 2``.
        """
        arguments = as_int("seq_id", seq_id), as_int("window", window), as_int("sink", sink)
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

    # --- attention, within a step ---------------------------------------------------------------

    def attention(
        self,
        layer: int,
        qkv: Any,
        sm_scale: float | None = None,
        out: Any = None,
        *,
        sinks: Any = None,
    ) -> tvm.runtime.Tensor:
        """Append this step's K and V of a layer and attend with its Q.

        Parameters
        ----------
        layer : int
        qkv : ``[T, num_qo_heads + 2 * num_kv_heads, head_dim]``, the cache's dtype
        sm_scale : float, optional
            Factor on the logits; None: ``head_dim ** -0.5``.
        out : tensor ``[T, num_qo_heads, head_dim]``, optional
            Where to write the result; must be contiguous.
        sinks : float32 ``[num_qo_heads]``, optional
            Learned sinks: a logit of each head (natural, not scaled) that joins the softmax, with
            nothing behind it. After `self_attention` or `cross_attention` they are a further part:
            `merge_attention` with ``o = 0`` and ``lse = sinks * log2(e)`` in every row.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``, or `out`
        """
        qkv = self._tensor("qkv", qkv)
        out = self._empty(layer, qkv.shape[0]) if out is None else out
        global_function(CACHE + "attention_with_fused_qkv")(
            self, as_int("layer", layer), self._scale(layer, sm_scale), qkv, out, self._sinks(sinks)
        )
        return out

    def self_attention(self, layer: int, q: Any, k: Any, v: Any, sm_scale: float | None = None):
        """Causal attention among the rows of this step; appends K and V as they are.

        With `cross_attention` and `merge_attention` it makes the whole of `attention` for models
        that rotate Q and K themselves.

        Of an MLA layer it is the attention before absorption, where each query head has K and V of
        its own, and appends nothing: `append_mla_kv` does.

        Parameters
        ----------
        q : ``[T, num_qo_heads, head_dim]``; k, v : ``[T, num_kv_heads, head_dim]``
            MLA: q and k ``[T, num_qo_heads, mla_original_qk_head_dim]``, v ``[T, num_qo_heads,
            mla_original_v_head_dim]``.
        sm_scale : float, optional
            Factor on the logits; None: ``head_dim ** -0.5``, with MLA that before absorption.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``
        lse : tvm tensor float32 ``[T, num_qo_heads]``, base 2
        """
        q, k, v = (self._tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        width = v.shape[-1] if self._is_mla(layer) else None
        o, lse = self._empty(layer, q.shape[0], width), self._empty_lse(layer, q.shape[0])
        global_function(CACHE + "self_attention")(
            self, as_int("layer", layer), self._scale(layer, sm_scale), q, k, v, o, lse
        )
        return o, lse

    def cross_attention(self, layer: int, q: Any, sm_scale: float | None = None):
        """Attention of ``q [T, num_qo_heads, head_dim]`` to what the cache held before this step.

        Of an MLA layer it is absorbed attention: to the latent rows, of which the first
        `v_head_dim` columns are V. In a step where every sequence appends one row it covers this
        step's row as well, unless `self_attention` of the layer was called before it in the step.
        So a decode step is `append_mla_kv` and `cross_attention`; any step is `append_mla_kv`,
        `self_attention`, `cross_attention` and, both in one space, `merge_attention`.

        Returns
        -------
        o, lse : as `self_attention`; rows of a sequence that was empty give 0 and -inf. MLA: o is
            ``[T, num_qo_heads, v_head_dim]``.
        """
        q = self._tensor("q", q)
        o, lse = self._empty(layer, q.shape[0]), self._empty_lse(layer, q.shape[0])
        global_function(CACHE + "cross_attention")(
            self, as_int("layer", layer), self._scale(layer, sm_scale), q, o, lse
        )
        return o, lse

    def merge_attention(self, o: Any, lse: Any, o_other: Any, lse_other: Any):
        """Combine two attention states over disjoint positions, in place into the first pair.

        Parameters
        ----------
        o, o_other : ``[T, num_heads, head_dim]``; lse, lse_other : float32 ``[T, num_heads]``
            The first pair must be contiguous tensors, for they are written.
        """
        other = self._tensor("o_other", o_other), self._tensor("lse_other", lse_other)
        merged = global_function(CACHE + "merge_attn_output_inplace")(self, o, lse, *other)
        return merged[0], merged[1]

    def attention_with_shared_kv(
        self,
        source_layer: int,
        q: Any,
        current_k: Any,
        current_v: Any,
        sm_scale: float | None = None,
        *,
        sinks: Any = None,
    ) -> tvm.runtime.Tensor:
        """Attention of a layer without K and V of its own to those of `source_layer`.

        The source must have run in this step; nothing is appended.

        Parameters
        ----------
        source_layer : int
        q : ``[T, num_qo_heads, head_dim]``, rotated by the model where the mode is "normal".
        current_k, current_v : ``[T, num_kv_heads, head_dim]``
            The source's rows of this step, as its pages have them.
        sm_scale : float, optional
        sinks : float32 ``[num_qo_heads]``, optional
            As `attention` takes them.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            Where the source has not run in this step, or is an MLA layer.
        """
        q = self._tensor("q", q)
        k, v = self._tensor("current_k", current_k), self._tensor("current_v", current_v)
        o = self._empty(source_layer, q.shape[0])
        global_function(CACHE + "attention_with_shared_kv")(
            self,
            as_int("source_layer", source_layer),
            self._scale(source_layer, sm_scale),
            q,
            k,
            v,
            o,
            self._sinks(sinks),
        )
        return o

    def append_mla_kv(self, layer: int, kv: Any) -> KVCache:
        """Append the latent rows ``kv [T, qk_head_dim]`` of an MLA layer, in the cache's dtype."""
        kv = self._tensor("kv", kv)
        return global_function(CACHE + "append_mla_kv")(self, as_int("layer", layer), kv)

    def query_positions(self) -> tvm.runtime.Tensor:
        """Position of each row in its sequence, int32 ``[T]``; valid until the next step.

        These are the positions to rotate by; `enable_sliding_window` says how a window counts.
        """
        return global_function(CACHE + "get_query_positions")(self)

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

    # --- helpers --------------------------------------------------------------------------------

    def _sinks(self, sinks: Any) -> tvm_ffi.Tensor | None:
        return None if sinks is None else self._tensor("sinks", sinks)

    def _layer(self, layer: int) -> dict[str, Any]:
        if layer not in self._layers:
            global_function("pagedkv.check_layer")(self, as_int("layer", layer))  # raises
        return self._layers[layer]

    @functools.cached_property
    def _layers(self) -> dict[int, dict[str, Any]]:
        return {layer["id"]: layer for layer in self.description["layers"]}

    def _is_mla(self, layer: int) -> bool:
        return self._layer(layer)["kind"] == "mla"

    def _scale(self, layer: int, sm_scale: float | None) -> float:
        if sm_scale is not None:
            return float(sm_scale)
        dim = "mla_original_qk_head_dim" if self._is_mla(layer) else "qk_head_dim"
        if not self._layer(layer)[dim]:
            raise ValueError(f"layer {layer} was made without {dim}, so sm_scale must be given")
        return self._layer(layer)[dim] ** -0.5

    def _empty(self, layer: int, num_rows: int, dim: int | None = None) -> tvm.runtime.Tensor:
        heads = self._layer(layer)["num_qo_heads"]
        dim = self._layer(layer)["v_head_dim"] if dim is None else dim
        info = self.description
        return tvm.runtime.empty((num_rows, heads, dim), info["dtype"], info["device"])

    def _empty_lse(self, layer: int, num_rows: int) -> tvm.runtime.Tensor:
        shape = (num_rows, self._layer(layer)["num_qo_heads"])
        return tvm.runtime.empty(shape, "float32", self.description["device"])
