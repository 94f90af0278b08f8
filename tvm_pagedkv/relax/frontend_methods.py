# SPDX-License-Identifier: Apache-2.0
"""What the functions of an `nn` model call on a cache that is given to them."""

from __future__ import annotations

from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as _PagedKVCacheBase


class PagedKVCacheObject(_PagedKVCacheBase):
    """A cache as an argument of a model's function: ``spec.Object(object_type=...)``.

    It has the methods of the class inside apache-tvm, two of them with learned sinks. That class
    does as well where a model has none. The sinks need a cache of this package.
    """

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: Tensor,
        num_qo_heads: int,
        sm_scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Append this step's K and V of a layer and attend with its Q.

        Parameters
        ----------
        qkv : ``[b, s, num_qo_heads + 2 * num_kv_heads, head_dim]``
        sinks : float32 ``[num_qo_heads]``, optional
            A logit of each head that joins the softmax, with nothing behind it.

        Returns
        -------
        o : ``[b, s, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            For sinks of another shape or type.
        """
        if sinks is None:
            return super().attention_with_fused_qkv(layer_id, qkv, num_qo_heads, sm_scale)
        b, s, num_heads, dim = qkv.shape
        return self._with_sinks(
            "pagedkv.attention_with_sinks",
            (layer_id, sm_scale),
            [qkv.reshape(b * s, num_heads, dim)],
            sinks,
            (b, s, num_qo_heads, dim),
        )

    def attention_with_shared_kv(
        self,
        source_layer_id: int,
        q: Tensor,
        current_k: Tensor,
        current_v: Tensor,
        sm_scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the K and V of another layer, which has run in this step.

        Parameters
        ----------
        q : ``[b, s, num_qo_heads, head_dim]``
        current_k, current_v : ``[b, s, num_kv_heads, head_dim]``
        sinks : float32 ``[num_qo_heads]``, optional

        Returns
        -------
        o : ``[b, s, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            For sinks of another shape or type.
        """
        if sinks is None:
            return super().attention_with_shared_kv(
                source_layer_id, q, current_k, current_v, sm_scale
            )
        b, s = q.shape[:2]
        return self._with_sinks(
            "pagedkv.attention_with_shared_kv_and_sinks",
            (source_layer_id, sm_scale),
            [x.reshape(b * s, *x.shape[2:]) for x in (q, current_k, current_v)],
            sinks,
            (b, s, q.shape[2], current_v.shape[3]),
        )

    def _with_sinks(self, name: str, scalars, rows: list[Tensor], sinks: Tensor, shape) -> Tensor:
        """Call a function whose tensors are `rows`, then the sinks, then its output."""
        b, s, num_heads, dim = shape
        if list(sinks.shape) != [num_heads] or sinks.dtype != "float32":
            raise ValueError(
                f"sinks must be float32 [{num_heads}], got {sinks.dtype} {list(sinks.shape)}"
            )
        arguments = [relax.prim_value(x) for x in scalars]
        arguments += [x._expr for x in (*rows, sinks)]
        out = relax.call_dps_packed(
            name,
            [self._expr, *arguments],
            out_ty=relax.TensorType((b * s, num_heads, dim), rows[0].dtype),
        )
        return Tensor(_expr=relax.BlockBuilder.current().emit(out)).reshape(*shape)
