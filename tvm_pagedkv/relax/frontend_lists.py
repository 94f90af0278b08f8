# SPDX-License-Identifier: Apache-2.0
"""`ListMethods`: attention to a part of the positions of a cache that a model's function takes."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax.frontend.nn import Object, Tensor


class ListMethods(Object):
    """Methods of a cache for layers whose rows attend to a part of the positions."""

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
        _check("positions", positions, "int32", 2)
        return self._attend(
            "pagedkv.attention_to_positions",
            [layer_id],
            [qkv, positions],
            num_qo_heads,
            sm_scale,
            sink_logits,
        )

    def attention_to_blocks(
        self,
        layer_id: int,
        qkv: Tensor,
        blocks: Tensor,
        block_size: int,
        num_qo_heads: int,
        sm_scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Do what `attention_to_positions` does, with lists of blocks of positions.

        Parameters
        ----------
        layer_id : int
        qkv : ``[T, num_qo_heads + 2 * num_kv_heads, head_dim]``
        blocks : int32 ``[T, width]`` or ``[T, lists, width]``
            From 0 to the row's own block, each once, in any order, or -1 for none. Each list of a
            row is for ``num_kv_heads // lists`` KV heads.
        block_size : int
            Positions of a block, a multiple of the page size.
        sink_logits : float32 ``[num_qo_heads]``, optional

        Returns
        -------
        o : ``[T, num_qo_heads, head_dim]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("blocks", blocks, "int32", 2, 3)
        scalars = [layer_id, block_size]
        return self._attend(
            "pagedkv.attention_to_blocks",
            scalars,
            [qkv, blocks],
            num_qo_heads,
            sm_scale,
            sink_logits,
        )

    def attention_within_budget(
        self,
        layer_id: int,
        qkv: Tensor,
        budget: int,
        num_qo_heads: int,
        sm_scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append this step's K and V of a layer, and let rows of decode steps attend to some pages.

        Parameters
        ----------
        layer_id : int
            A layer of a cache made with ``page_bounds=True``.
        qkv : ``[T, num_qo_heads + 2 * num_kv_heads, head_dim]``
            T is the number of rows of the step, for all its sequences.
        budget : int
            Positions of the pages that each KV head attends to in a step with one row for each
            sequence, as for `KVCache.attention`. Other steps attend to everything.
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
        scalars = [layer_id, budget]
        return self._attend(
            "pagedkv.attention_within_budget", scalars, [qkv], num_qo_heads, sm_scale, sink_logits
        )

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
        _check("positions", positions, "int32", 2)
        name = "pagedkv.cross_attention_to_positions"
        return self._cross_attend(name, layer_id, [], q, positions, v_head_dim, sm_scale)

    def cross_attention_to_blocks(
        self,
        layer_id: int,
        q: Tensor,
        blocks: Tensor,
        block_size: int,
        v_head_dim: int,
        sm_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Do what `cross_attention_to_positions` does, with lists of blocks of positions.

        Parameters
        ----------
        layer_id : int
        q : ``[T, num_qo_heads, head_dim]``
        blocks : int32 ``[T, width]`` or ``[T, lists, width]``
        block_size : int
            As for `attention_to_blocks`.

        Returns
        -------
        o : ``[T, num_qo_heads, v_head_dim]``
        lse : float32 ``[T, num_qo_heads]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("blocks", blocks, "int32", 2, 3)
        name = "pagedkv.cross_attention_to_blocks"
        return self._cross_attend(name, layer_id, [block_size], q, blocks, v_head_dim, sm_scale)

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
        _check("q", q, q.dtype, 3)
        _check("weights", weights, "float32", 2)
        out = relax.TensorType((q.shape[0], k), "int32")
        call = self._call_lists("pagedkv.index_top_k", [layer_id, float(scale)], [q, weights], out)
        return Tensor(_expr=call)

    def index_top_blocks(
        self,
        layer_id: int,
        q: Tensor,
        k: int,
        block_size: int,
        init_blocks: int = 0,
        local_blocks: int = 1,
    ) -> Tensor:
        """Choose blocks of positions for each head of each row.

        The score of a block is the largest product ``q . key`` of a position in it that the row
        sees, in float32.

        Parameters
        ----------
        layer_id : int
            A layer of kind "index", which has appended the keys of this step.
        q : ``[T, num_heads, dim]``
        k : int
            Blocks that a list may have.
        block_size : int
            Positions of a block, a multiple of the page size.
        init_blocks, local_blocks : int
            The first blocks, and the last ones up to the row's own, that are always chosen.

        Returns
        -------
        blocks : int32 ``[T, num_heads, k]``
            For `attention_to_blocks`: in order, of those that the row sees, then -1.

        Raises
        ------
        ValueError
            If `q` has another number of dimensions.
        """
        _check("q", q, q.dtype, 3)
        out = relax.TensorType((*q.shape[:2], k), "int32")
        scalars = [layer_id, block_size, init_blocks, local_blocks]
        return Tensor(_expr=self._call_lists("pagedkv.index_top_blocks", scalars, [q], out))

    def _attend(
        self,
        name: str,
        scalars: list[int],
        tensors: list[Tensor],
        num_qo_heads: int,
        sm_scale: float,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Emit a call of attention with fused rows, the first of the tensors, to some positions."""
        qkv, *lists = tensors
        _check("qkv", qkv, qkv.dtype, 3)
        if sink_logits is not None:
            _check("sink_logits", sink_logits, "float32", 1)
            lists.append(sink_logits)
        rows, _, dim = qkv.shape
        out = relax.TensorType((rows, num_qo_heads, dim), qkv.dtype)
        call = self._call_lists(name, [*scalars, float(sm_scale)], [qkv, *lists], out)
        return Tensor(_expr=call)

    def _cross_attend(
        self,
        name: str,
        layer_id: int,
        sizes: list[int],
        q: Tensor,
        lists: Tensor,
        v_head_dim: int,
        sm_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Emit a call of attention to lists, of rows that are appended."""
        _check("q", q, q.dtype, 3)
        rows, num_heads, _ = q.shape
        outs = [
            relax.TensorType((rows, num_heads, v_head_dim), q.dtype),
            relax.TensorType((rows, num_heads), "float32"),
        ]
        scalars = [layer_id, *sizes, float(sm_scale)]
        both = self._call_lists(name, scalars, [q, lists], outs)
        o, lse = (relax.BlockBuilder.current().emit(relax.TupleGetItem(both, i)) for i in range(2))
        return Tensor(_expr=o), Tensor(_expr=lse)

    def _call_lists(
        self,
        name: str,
        scalars: Sequence[int | float],
        tensors: list[Tensor],
        out: relax.TensorType | list[relax.TensorType],
    ) -> relax.Var:
        """Emit a call of a global function whose outputs come last."""
        arguments = [relax.prim_value(scalar) for scalar in scalars]
        arguments += [tensor._expr for tensor in tensors]
        call = relax.call_dps_packed(name, [self._expr, *arguments], out_ty=out)
        return relax.BlockBuilder.current().emit(call)


def _check(name: str, tensor: Tensor, dtype: str, *dimensions: int) -> None:
    if len(tensor.shape) not in dimensions or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be of type {dtype} and have {' or '.join(map(str, dimensions))} "
            f"dimensions, got {tensor.dtype} {list(tensor.shape)}"
        )
