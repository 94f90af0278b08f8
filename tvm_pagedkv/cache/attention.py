# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that models call within a step: appends and attention."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi

from .._deprecation import renamed_arguments
from .._functions import CACHE, as_int, global_function
from .inspection import CacheInspection

if TYPE_CHECKING:
    from typing_extensions import Self

# Output and log-sum-exp of attention to a part of the positions.
AttentionState = tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]


class CacheAttention(CacheInspection):
    """The methods of `KVCache` that append K and V and attend to them."""

    __slots__ = ()

    @renamed_arguments(sinks="sink_logits")
    def attention(
        self,
        layer: int,
        qkv: Any,
        sm_scale: float | None = None,
        out: Any = None,
        *,
        sink_logits: Any = None,
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
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks: one logit per head, natural and unscaled, that joins the
            softmax without a value. After `self_attention` or `cross_attention`, pass them to
            `merge_attention` as a state with ``o = 0`` and ``lse = sink_logits * log2(e)``.

        Returns
        -------
        o : tvm tensor ``[T, num_qo_heads, head_dim]``, or `out`
        """
        qkv = self._tensor("qkv", qkv)
        out = self._empty(layer, qkv.shape[0]) if out is None else out
        global_function(CACHE + "attention_with_fused_qkv")(
            self,
            as_int("layer", layer),
            self._scale(layer, sm_scale),
            qkv,
            out,
            self._sink_logits(sink_logits),
        )
        return out

    def self_attention(
        self, layer: int, q: Any, k: Any, v: Any, sm_scale: float | None = None
    ) -> AttentionState:
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

    def cross_attention(self, layer: int, q: Any, sm_scale: float | None = None) -> AttentionState:
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

    def merge_attention(self, o: Any, lse: Any, o_other: Any, lse_other: Any) -> AttentionState:
        """Combine two attention states over disjoint positions, in place into the first pair.

        Parameters
        ----------
        o, o_other : ``[T, num_heads, head_dim]``; lse, lse_other : float32 ``[T, num_heads]``
            The first pair must be contiguous tensors, for they are written.
        """
        other = self._tensor("o_other", o_other), self._tensor("lse_other", lse_other)
        merged = global_function(CACHE + "merge_attn_output_inplace")(self, o, lse, *other)
        return merged[0], merged[1]

    @renamed_arguments(sinks="sink_logits")
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
        """Attention of a layer without K and V of its own to those of `source_layer`.

        The source must have run in this step; nothing is appended.

        Parameters
        ----------
        source_layer : int
        q : ``[T, num_qo_heads, head_dim]``, rotated by the model where the mode is "normal".
        current_k, current_v : ``[T, num_kv_heads, head_dim]``
            The source's rows of this step, as its pages have them.
        sm_scale : float, optional
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks, as for `attention`.

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
            self._sink_logits(sink_logits),
        )
        return o

    def append_mla_kv(self, layer: int, kv: Any) -> Self:
        """Append the latent rows ``kv [T, qk_head_dim]`` of an MLA layer, in the cache's dtype."""
        kv = self._tensor("kv", kv)
        return global_function(CACHE + "append_mla_kv")(self, as_int("layer", layer), kv)

    def query_positions(self) -> tvm.runtime.Tensor:
        """Position of each row in its sequence, int32 ``[T]``; valid until the next step.

        These are the positions to rotate by; `enable_sliding_window` says how a window counts.
        """
        return global_function(CACHE + "get_query_positions")(self)

    # --- helpers --------------------------------------------------------------------------------

    def _sink_logits(self, sink_logits: Any) -> tvm_ffi.Tensor | None:
        return None if sink_logits is None else self._tensor("sink_logits", sink_logits)

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
