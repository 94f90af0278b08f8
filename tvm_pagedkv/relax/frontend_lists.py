# SPDX-License-Identifier: Apache-2.0
"""`ListMethods`: attention to lists of positions of a cache that a model's function takes."""

from __future__ import annotations

from tvm import relax
from tvm.relax.frontend.nn import Object, Tensor


class ListMethods(Object):
    """Methods of a cache for layers whose rows attend to lists of positions."""

    def attention_to_positions(
        self,
        layer_id: int,
        qkv: Tensor,
        positions: Tensor,
        num_qo_heads: int,
        sm_scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append this step's K and V of a layer, and let each row of Q attend to its list.

        Parameters
        ----------
        layer_id : int
            A layer of a cache made with ``lists=True``.
        qkv : ``[T, num_qo_heads + 2 * num_kv_heads, head_dim]``
            T is the number of rows of the step, for all its sequences.
        positions : int32 ``[T, width]``
            From 0 to the row's own position, in any order, or -1 for none.
        sink_logits : float32 ``[num_qo_heads]``, optional
            Learned attention sinks.

        Returns
        -------
        o : ``[T, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("qkv", qkv, 3, qkv.dtype)
        _check("positions", positions, 2, "int32")
        tensors = [qkv, positions]
        if sink_logits is not None:
            _check("sink_logits", sink_logits, 1, "float32")
            tensors.append(sink_logits)
        rows, _, dim = qkv.shape
        out = relax.TensorType((rows, num_qo_heads, dim), qkv.dtype)
        name = "pagedkv.attention_to_positions"
        return Tensor(_expr=self._call_with_lists(name, layer_id, sm_scale, tensors, out))

    def cross_attention_to_positions(
        self, layer_id: int, q: Tensor, positions: Tensor, v_head_dim: int, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Let each row of Q attend to its list; the layer has appended this step's rows before.

        Parameters
        ----------
        layer_id : int
            A layer of a cache made with ``lists=True``; of an MLA layer, absorbed attention.
        q : ``[T, num_qo_heads, head_dim]``
        positions : int32 ``[T, width]``
            As for `attention_to_positions`.

        Returns
        -------
        o : ``[T, num_qo_heads, v_head_dim]``
        lse : float32 ``[T, num_qo_heads]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("q", q, 3, q.dtype)
        _check("positions", positions, 2, "int32")
        rows, num_heads, _ = q.shape
        outs = [
            relax.TensorType((rows, num_heads, v_head_dim), q.dtype),
            relax.TensorType((rows, num_heads), "float32"),
        ]
        name = "pagedkv.cross_attention_to_positions"
        both = self._call_with_lists(name, layer_id, sm_scale, [q, positions], outs)
        o, lse = (relax.BlockBuilder.current().emit(relax.TupleGetItem(both, i)) for i in range(2))
        return Tensor(_expr=o), Tensor(_expr=lse)

    def index_top_k(
        self, layer_id: int, q: Tensor, weights: Tensor, k: int, scale: float = 1.0
    ) -> Tensor:
        """Choose for each row the positions whose index scores are largest.

        The score of a position is the sum over the index heads of
        ``weight * max(0, scale * (q . key))``, in float32.

        Parameters
        ----------
        layer_id : int
            A layer of kind "index", which has appended the keys of this step.
        q : ``[T, num_heads, dim]``
        weights : float32 ``[T, num_heads]``
        k : int
            Positions that a row may list.

        Returns
        -------
        positions : int32 ``[T, k]``
            For the methods above: in order, of those that the row sees, then -1.

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("q", q, 3, q.dtype)
        _check("weights", weights, 2, "float32")
        out = relax.TensorType((q.shape[0], k), "int32")
        name = "pagedkv.index_top_k"
        return Tensor(_expr=self._call_with_lists(name, layer_id, scale, [q, weights], out))

    def _call_with_lists(
        self,
        name: str,
        layer_id: int,
        sm_scale: float,
        tensors: list[Tensor],
        out: relax.TensorType | list[relax.TensorType],
    ) -> relax.Var:
        arguments = [relax.prim_value(layer_id), relax.prim_value(float(sm_scale))]
        arguments += [tensor._expr for tensor in tensors]
        call = relax.call_dps_packed(name, [self._expr, *arguments], out_ty=out)
        return relax.BlockBuilder.current().emit(call)


def _check(name: str, tensor: Tensor, ndim: int, dtype: str) -> None:
    if len(tensor.shape) != ndim or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be of type {dtype} and have {ndim} dimensions, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
