# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that models with index lanes call within a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tvm

from .._checks import check_int
from .._functions import as_int, global_function
from .attention import CacheAttention

if TYPE_CHECKING:
    from typing_extensions import Self


class CacheIndexLanes(CacheAttention):
    """The methods of `KVCache` by which rows choose what they list."""

    __slots__ = ()

    def append_index(self, layer: int, keys: Any) -> Self:
        """Append this step's index keys of an index lane.

        Parameters
        ----------
        layer : int
            Id of an "index" layer.
        keys : tensor ``[T, qk_head_dim]``, the cache's dtype
            As they are multiplied with Q: normalised and rotated by the model.

        Returns
        -------
        KVCache
            This cache.
        """
        return self.append_mla_kv(layer, keys)

    def index_top_k(
        self, layer: int, q: Any, weights: Any, k: int, scale: float = 1.0
    ) -> tvm.runtime.Tensor:
        """Choose for each row of this step the positions whose index scores are largest.

        The score of a position is the sum over the index heads of
        ``weight * max(0, scale * (q . key))``, in float32.

        Parameters
        ----------
        layer : int
            Id of an "index" layer, which has appended this step's keys.
        q : tensor ``[T, num_qo_heads, qk_head_dim]``, the cache's dtype
        weights : float32 ``[T, num_qo_heads]``
        k : int
            Positions that a row may list.
        scale : float
            Factor on the products.

        Returns
        -------
        positions : tvm tensor int32 ``[T, k]``
            For `attention` and `cross_attention` of any layer: in order, of those that the row
            sees, then -1. Of equal scores the first positions are chosen.

        Raises
        ------
        ValueError, TypeError, IndexError
            If no step has begun, the layer is no index lane or has not appended, a tensor does not
            fit, or the step has token trees that branch.
        """
        q, weights = self._tensor("q", q), self._tensor("weights", weights)
        shape = (q.shape[0], check_int("k", k))
        positions = tvm.runtime.empty(shape, "int32", self.description["device"])
        arguments = as_int("layer", layer), float(scale), q, weights, positions
        global_function("pagedkv.index_top_k")(self, *arguments)
        return positions

    def index_top_blocks(
        self,
        layer: int,
        q: Any,
        k: int,
        block_size: int,
        *,
        init_blocks: int = 0,
        local_blocks: int = 1,
    ) -> tvm.runtime.Tensor:
        """Choose blocks of positions for each head of each row of this step.

        The score of a block is the largest product ``q . key`` of a position in it that the row
        sees (max pooling, as in MiniMax-M3), in float32. Some blocks are always chosen.

        Parameters
        ----------
        layer : int
            Id of an "index" layer, which has appended this step's keys.
        q : tensor ``[T, num_qo_heads, qk_head_dim]``, the cache's dtype
        k : int
            Blocks that a list may have.
        block_size : int
            Positions of a block, a multiple of the page size.
        init_blocks : int
            The first blocks of the sequence, so many, are always chosen.
        local_blocks : int
            So are the row's own block and those before it, so many. Together with `init_blocks`, at
            most `k`.

        Returns
        -------
        blocks : tvm tensor int32 ``[T, num_qo_heads, k]``
            For `attention` of a layer whose KV heads are divided among the index heads: in order,
            of those that the row sees, then -1. Of equal scores the first blocks are chosen.

        Raises
        ------
        ValueError, TypeError, IndexError
            As `index_top_k`.
        """
        q = self._tensor("q", q)
        shape = (*q.shape[:2], check_int("k", k))
        blocks = tvm.runtime.empty(shape, "int32", self.description["device"])
        numbers = [
            as_int(name, number)
            for name, number in (
                ("block_size", block_size),
                ("init_blocks", init_blocks),
                ("local_blocks", local_blocks),
            )
        ]
        global_function("pagedkv.index_top_blocks")(
            self, as_int("layer", layer), *numbers, q, blocks
        )
        return blocks
