# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCacheObject`: the methods of a cache that is an argument of a model's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as _PagedKVCacheBase

from .frontend_lists import ListMethods
from .frontend_states import StateMethods


class PagedKVCacheObject(StateMethods, ListMethods, _PagedKVCacheBase):
    """A cache that is an argument of a model's function: ``spec.Object(object_type=...)``.

    It adds learned attention sinks to two methods of TVM's ``PagedKVCache``, and methods for layers
    that keep a state and for attention to lists of positions. Models without these can use TVM's
    class instead. They need a cache of this package.
    """

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: Tensor,
        num_qo_heads: int,
        sm_scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append this step's K and V of a layer, and attend with its Q.

        Parameters
        ----------
        layer_id : int
        qkv : ``[b, s, num_qo_heads + 2 * num_kv_heads, head_dim]``
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks: one logit per head that joins the softmax without a value.

        Returns
        -------
        o : ``[b, s, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            If `sink_logits` has another shape or dtype.
        """
        if sink_logits is None:
            return super().attention_with_fused_qkv(layer_id, qkv, num_qo_heads, sm_scale)
        b, s, num_heads, dim = qkv.shape
        return self._with_sinks(
            "pagedkv.attention_with_sinks",
            (layer_id, sm_scale),
            [qkv.reshape(b * s, num_heads, dim)],
            sink_logits,
            (b, s, num_qo_heads, dim),
        )

    def attention_with_shared_kv(
        self,
        source_layer_id: int,
        q: Tensor,
        current_k: Tensor,
        current_v: Tensor,
        sm_scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attend to the K and V of another layer, which must have run in this step.

        Parameters
        ----------
        source_layer_id : int
        q : ``[b, s, num_qo_heads, head_dim]``
        current_k, current_v : ``[b, s, num_kv_heads, head_dim]``
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks, as for `attention_with_fused_qkv`.

        Returns
        -------
        o : ``[b, s, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            If `sink_logits` has another shape or dtype.
        """
        if sink_logits is None:
            return super().attention_with_shared_kv(
                source_layer_id, q, current_k, current_v, sm_scale
            )
        b, s = q.shape[:2]
        return self._with_sinks(
            "pagedkv.attention_with_shared_kv_and_sinks",
            (source_layer_id, sm_scale),
            [x.reshape(b * s, *x.shape[2:]) for x in (q, current_k, current_v)],
            sink_logits,
            (b, s, q.shape[2], current_v.shape[3]),
        )

    def append_mla_kv(self, layer_id: int, kv: Tensor) -> PagedKVCacheObject:
        """Append this step's latent rows of a layer.

        Parameters
        ----------
        layer_id : int
        kv : ``[b, s, 1, qk_head_dim]``

        Returns
        -------
        PagedKVCacheObject
            The cache, for what reads these rows.
        """
        appended = super().append_mla_kv(layer_id, kv)
        return PagedKVCacheObject(_expr=appended._expr, _name="paged_kv_cache")

    def append_index(self, layer_id: int, keys: Tensor) -> PagedKVCacheObject:
        """Append this step's index keys of an index lane.

        Parameters
        ----------
        layer_id : int
            A layer of kind "index".
        keys : ``[T, qk_head_dim]``
            As they are multiplied with Q: normalized and rotated by the model.

        Returns
        -------
        PagedKVCacheObject
            The cache, for `index_top_k`.
        """
        rows, dim = keys.shape
        return self.append_mla_kv(layer_id, keys.reshape(1, rows, 1, dim))

    def _with_sinks(
        self,
        name: str,
        scalars: Sequence[Any],
        rows: list[Tensor],
        sink_logits: Tensor,
        shape: tuple[Any, ...],
    ) -> Tensor:
        """Emit a call whose tensor arguments are `rows`, the sink logits, then the output."""
        b, s, num_heads, dim = shape
        if list(sink_logits.shape) != [num_heads] or sink_logits.dtype != "float32":
            got = f"{sink_logits.dtype} {list(sink_logits.shape)}"
            raise ValueError(f"sink_logits must be float32 [{num_heads}], got {got}")
        arguments = [relax.prim_value(x) for x in scalars]
        arguments += [x._expr for x in (*rows, sink_logits)]
        out = relax.call_dps_packed(
            name,
            [self._expr, *arguments],
            out_ty=relax.TensorType((b * s, num_heads, dim), rows[0].dtype),
        )
        return Tensor(_expr=relax.BlockBuilder.current().emit(out)).reshape(*shape)
