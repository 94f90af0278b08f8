# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that models call within a step: appends and attention."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi

from .._functions import CACHE, as_int, global_function
from .inspection import CacheInspection

if TYPE_CHECKING:
    from typing_extensions import Self

# A partial state: o [T, num_qo_heads, head_dim] and its base-2 log-sum-exp [T, num_qo_heads].
AttentionState = tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]


_attention_with_fused_qkv = functools.partial(global_function, CACHE + "attention_with_fused_qkv")


class CacheAttention(CacheInspection):
    """The methods of `KVCache` that append K and V and attend to them."""

    __slots__ = ()

    def attention(
        self,
        layer: int,
        qkv: Any,
        sm_scale: float | None = None,
        out: Any = None,
        *,
        sink_logits: Any = None,
        positions: Any = None,
        blocks: Any = None,
        block_size: int | None = None,
        budget: int | None = None,
    ) -> tvm.runtime.Tensor:
        """Append this step's K and V of a layer, and attend with its Q.

        Parameters
        ----------
        layer : int
            Id of an "mha" or "mha_sliding" layer.
        qkv : tensor ``[T, num_qo_heads + 2 * num_kv_heads, head_dim]``, the cache's dtype
            Rows of Q, K and V, unrotated unless the RoPE mode is "none". If `qk_head_dim` and
            `v_head_dim` differ, ``[T, elements]``: the heads of Q, then of K, then of V.
        sm_scale : float, optional
            Factor on the logits; None: ``head_dim ** -0.5``.
        out : contiguous tensor ``[T, num_qo_heads, head_dim]``, optional
            Receives the result.
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks: one logit per head, natural and unscaled, that joins the
            softmax without a value. Layers made with ``LayerSpec(sink_logits=True)`` take them
            within attention, others in a pass after it.
        positions : int32 ``[T, width]``, optional
            The positions that each row attends to, in any order, in place of all up to its own:
            from 0 to its own position, or -1 for none. One that is listed twice counts twice. The
            layer needs ``LayerSpec(lists=True)``. On a CPU other positions are refused; elsewhere
            they are left out.
        blocks : int32 ``[T, width]`` or ``[T, lists, width]``, optional
            The blocks of positions that each row attends to, in any order, in place of `positions`:
            from 0 to its own block, each once, or -1 for none. Of its own block a row sees the
            positions up to its own. With several lists of a row, each is for
            ``num_kv_heads // lists`` KV heads and their query heads. The layer needs
            ``LayerSpec(lists=True)``.
        block_size : int, optional
            Positions of a block, a multiple of the page size; required with `blocks`. Block i has
            the positions from ``i * block_size`` on.
        budget : int, optional
            In a decode step, where every sequence appends one row, the positions that each KV head
            attends to, rounded down to pages and at least two of them: those of the pages with the
            largest bounds on ``q . k``, as in Quest, and always the first and the last page. Other
            steps attend to everything. The layer needs ``LayerSpec(page_bounds=True)``.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``, the cache's dtype
            `out`, if it was given.

        Raises
        ------
        ValueError, TypeError, IndexError
            If no step has begun, the layer does not exist, or a tensor does not fit.
        """
        # Models call this for every layer of every step: the usual arguments are not converted.
        if not isinstance(qkv, tvm_ffi.core.Tensor):
            qkv = self._tensor("qkv", qkv)
        if sm_scale is None:
            sm_scale = self._default_scales.get(layer)
        if sm_scale is None or type(sm_scale) is not float:
            sm_scale = self._scale(layer, sm_scale)
        if sink_logits is not None:
            sink_logits = self._sink_logits(sink_logits)
        if out is None:
            out = self._empty(layer, qkv.shape[0])
        if budget is not None:
            if positions is not None or blocks is not None or block_size is not None:
                raise ValueError("budget is not possible with positions or blocks")
            call = global_function("pagedkv.attention_within_budget")
            number = as_int("budget", budget)
            call(self, as_int("layer", layer), number, sm_scale, qkv, out, sink_logits)
            return out
        if positions is not None or blocks is not None or block_size is not None:
            size, lists = self._lists(positions, blocks, block_size)
            name = "pagedkv.attention_to_blocks" if size else "pagedkv.attention_to_positions"
            arguments = *size, sm_scale, qkv, lists, out, sink_logits
            global_function(name)(self, as_int("layer", layer), *arguments)
            return out
        _attention_with_fused_qkv()(self, as_int("layer", layer), sm_scale, qkv, out, sink_logits)
        return out

    def self_attention(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        sm_scale: float | None = None,
        *,
        sink_logits: Any = None,
    ) -> AttentionState:
        """Attend causally among the rows of this step, and append K and V unrotated.

        For models that rotate Q and K themselves: `self_attention`, `cross_attention` and
        `merge_attention` together compute what `attention` does.

        For an MLA layer this is attention before absorption, where every query head has its own K
        and V. It appends nothing; `append_mla_kv` does.

        Parameters
        ----------
        layer : int
        q : tensor ``[T, num_qo_heads, head_dim]``
            MLA: ``[T, num_qo_heads, mla_original_qk_head_dim]``.
        k, v : tensors ``[T, num_kv_heads, head_dim]``
            MLA: ``[T, num_qo_heads, mla_original_qk_head_dim]`` and
            ``[T, num_qo_heads, mla_original_v_head_dim]``.
        sm_scale : float, optional
            Factor on the logits; None: ``head_dim ** -0.5``, for MLA of the original head_dim.
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks, as for `attention`. Of states that are merged, one may have
            them. MLA layers need ``LayerSpec(sink_logits=True)``.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``, the cache's dtype
        lse : tvm tensor float32 ``[T, num_qo_heads]``
            Base-2 log-sum-exp of the logits.

        Raises
        ------
        ValueError, TypeError, IndexError
            As `attention`.
        """
        q, k, v = (self._tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        width = v.shape[-1] if self._is_mla(layer) else None
        o, lse = self._empty(layer, q.shape[0], width), self._empty_lse(layer, q.shape[0])
        global_function(CACHE + "self_attention")(
            self,
            as_int("layer", layer),
            self._scale(layer, sm_scale),
            *(q, k, v, o, lse),
            self._sink_logits(sink_logits),
        )
        return o, lse

    def cross_attention(
        self,
        layer: int,
        q: Any,
        sm_scale: float | None = None,
        *,
        positions: Any = None,
        blocks: Any = None,
        block_size: int | None = None,
        sink_logits: Any = None,
    ) -> AttentionState:
        """Attend to the positions that the cache held before this step.

        For an MLA layer this is absorbed attention to the latent rows, whose first `v_head_dim`
        columns are V. If every sequence appends one row, it covers that row as well, unless
        `self_attention` was called for the layer first. So a decode step calls `append_mla_kv` and
        `cross_attention`; any other step calls `append_mla_kv`, `self_attention`, `cross_attention`
        and, with both outputs in the same space, `merge_attention`.

        Parameters
        ----------
        layer : int
        q : tensor ``[T, num_qo_heads, head_dim]``
        sm_scale : float, optional
            Factor on the logits; None: as for `self_attention`.
        positions : int32 ``[T, width]``, optional
            The positions that each row attends to, as for `attention`. They may be of this step,
            whose rows the layer must have appended; so a step of any kind calls `append_mla_kv` and
            `cross_attention`.
        blocks : int32 ``[T, width]`` or ``[T, lists, width]``, optional
        block_size : int, optional
            The blocks of positions that each row attends to, as for `attention`, of this step too.
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks, as for `self_attention`.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, v_head_dim]``, the cache's dtype
            0 for rows of a sequence that was empty.
        lse : tvm tensor float32 ``[T, num_qo_heads]``
            Base-2 log-sum-exp of the logits; without sinks -inf for these rows.

        Raises
        ------
        ValueError, TypeError, IndexError
            As `attention`.
        """
        q = self._tensor("q", q)
        o, lse = self._empty(layer, q.shape[0]), self._empty_lse(layer, q.shape[0])
        number, scale = as_int("layer", layer), self._scale(layer, sm_scale)
        outputs = o, lse, self._sink_logits(sink_logits)
        if positions is not None or blocks is not None or block_size is not None:
            size, lists = self._lists(positions, blocks, block_size)
            name = (
                "pagedkv.cross_attention_to_blocks"
                if size
                else "pagedkv.cross_attention_to_positions"
            )
            global_function(name)(self, number, *size, scale, q, lists, *outputs)
        else:
            global_function(CACHE + "cross_attention")(self, number, scale, q, *outputs)
        return o, lse

    def merge_attention(self, o: Any, lse: Any, o_other: Any, lse_other: Any) -> AttentionState:
        """Merge two partial states over disjoint positions into the first one, in place.

        Parameters
        ----------
        o, lse : contiguous tensors ``[T, num_heads, head_dim]`` and float32 ``[T, num_heads]``
            Overwritten with the merged state.
        o_other, lse_other : tensors of the same shapes and dtypes

        Returns
        -------
        o, lse : the arguments

        Raises
        ------
        ValueError, TypeError
            If a tensor does not fit, or `o` or `lse` cannot be written in place.
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
        sink_logits: Any = None,
    ) -> tvm.runtime.Tensor:
        """Attend with the Q of a layer to the K and V of another layer; append nothing.

        Parameters
        ----------
        source_layer : int
            Id of the layer whose K and V are read; it must have run in this step.
        q : tensor ``[T, num_qo_heads, head_dim]``
            Rotated by the model if the RoPE mode is "normal".
        current_k, current_v : tensors ``[T, num_kv_heads, head_dim]``
            The source's rows of this step, as its pages hold them.
        sm_scale : float, optional
            Factor on the logits; None: ``head_dim ** -0.5``.
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks, as for `attention`.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``, the cache's dtype

        Raises
        ------
        ValueError
            If the source has not run in this step, or is an MLA layer.
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
            self._sink_logits(sink_logits),
        )
        return o

    def append_mla_kv(self, layer: int, kv: Any) -> Self:
        """Append this step's latent rows of an MLA layer.

        Parameters
        ----------
        layer : int
        kv : tensor ``[T, qk_head_dim]``, the cache's dtype
            Compressed KV and rotated key part, concatenated.

        Returns
        -------
        KVCache
            This cache.
        """
        kv = self._tensor("kv", kv)
        return global_function(CACHE + "append_mla_kv")(self, as_int("layer", layer), kv)

    def query_positions(self) -> tvm.runtime.Tensor:
        """Return the RoPE position of each row of this step.

        Returns
        -------
        tvm tensor int32 ``[T]``
            Valid until the next step. With a sliding window of the sequence, see
            `enable_sliding_window` for how positions count.
        """
        return global_function(CACHE + "get_query_positions")(self)

    # --- helpers --------------------------------------------------------------------------------

    def _sink_logits(self, sink_logits: Any) -> tvm_ffi.Tensor | None:
        return None if sink_logits is None else self._tensor("sink_logits", sink_logits)

    def _lists(
        self, positions: Any, blocks: Any, block_size: int | None
    ) -> tuple[list[int], tvm_ffi.Tensor]:
        """Return the size of a block, if lists name blocks, and the lists."""
        if (positions is None) == (blocks is None):
            given = "neither" if blocks is None else "both"
            raise ValueError(f"rows list either positions or blocks, got {given}")
        if (blocks is None) != (block_size is None):
            raise ValueError(
                "blocks and block_size need each other, got "
                + ("block_size alone" if blocks is None else "blocks alone")
            )
        if block_size is None:
            return [], self._tensor("positions", positions)
        return [as_int("block_size", block_size)], self._tensor("blocks", blocks)

    def _layer(self, layer: int) -> dict[str, Any]:
        if layer not in self._layers:
            global_function("pagedkv.check_layer")(self, as_int("layer", layer))  # raises
        return self._layers[layer]

    @functools.cached_property
    def _layers(self) -> dict[int, dict[str, Any]]:
        return {layer["id"]: layer for layer in self.description["layers"]}

    @functools.cached_property
    def _default_scales(self) -> dict[int, float]:
        """The factor on the logits of layers that are not MLA."""
        layers = self._layers.values()
        return {x["id"]: x["qk_head_dim"] ** -0.5 for x in layers if x["kind"] != "mla"}

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
