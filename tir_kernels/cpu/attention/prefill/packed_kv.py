# SPDX-License-Identifier: Apache-2.0
"""A tile of K and V, packed for register tiles, while the next one is prefetched."""

from __future__ import annotations

from tvm.script import tirx as T

from ....semantics.visibility import Span
from ....spec import KernelSpec
from ...columns import Panels
from ...operands import ROWS_AT_ONCE, pack_k
from ...simd import elements_per_line, index_temp
from ..kv_rows import PagedRows, RaggedRows
from .tiling import POSITIONS, VECTORS


class PackedKv:
    """The packed tile of a task: `k` transposed, `v` as it lies.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object

    Attributes
    ----------
    k, v : Panels
    num_positions : int32 expression
        Positions of V that are packed; those past the end of the span are zeros.
    first_position : int32 expression
        RoPE position of the first column, for ALiBi.
    """

    def __init__(self, spec: KernelSpec, ops):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.depth = spec.qk_head_dim // ops.numbers
        width = VECTORS * self.lanes
        self.k = Panels(self.depth, POSITIONS, width, ops.dtype)
        self.v = Panels(POSITIONS // ops.numbers, spec.v_head_dim, width, ops.dtype)
        # Rows of the next tile; those of V are a part of K's with MLA.
        self.num_prefetched = POSITIONS if spec.kind == "mla" else 2 * POSITIONS

    def pack(self, a, rows: PagedRows | RaggedRows, first, span: Span) -> None:
        """Pack the tile from `first` on; what lies beyond the span is left for the mask to hide."""
        lanes, ops = self.lanes, self.ops
        count = index_temp(T.min(POSITIONS, span.end - first))
        with T.serial((count + lanes - 1) // lanes) as i:
            pack_k(ops, rows, first + i * lanes, self.k.at, self.depth, i * lanes)
        self.following = rows, index_temp(first + POSITIONS), span.end
        a.mask.begin_tile(first, a.rope)

        if self.spec.alibi_slopes:
            self.first_position = index_temp(span.k_offset + first)

        def rotated():
            position = index_temp(span.k_offset + first)
            a.rope.rotate_tile(ops, self.k.at, POSITIONS, position, a.mask.offsets)

        a.rope.either(rotated, lambda: None)
        width = self.spec.v_head_dim
        self.num_positions = index_temp((count + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE)
        ops.pack_v(rows, first, span.end, self.v.at, width, self.num_positions, span.begin)

    def rows_per_product(self, num_products):
        """Rows of the next tile to prefetch during each of `num_products` products."""
        return index_temp((self.num_prefetched + num_products - 1) // num_products)

    def prefetch(self, product, rows_per_product) -> None:
        """Prefetch some rows of K of the next tile, then of V.

        Each product is preceded by a few, because asking for much at once would wait for memory.
        """
        rows, first, end = self.following
        spec = self.spec
        k_line, v_line = map(elements_per_line, (spec.k_dtype, spec.v_dtype))
        begin = index_temp(product * rows_per_product)
        count = T.min(rows_per_product, self.num_prefetched - begin)
        with T.If(first < end), T.Then(), T.serial(count) as i:
            row = index_temp(begin + i)
            with T.If(row < POSITIONS):
                with T.Then():
                    tile = rows.tile(first + row, 1)
                    for column in range(0, spec.qk_head_dim, k_line):
                        tile.prefetch_k(0, column)
                with T.Else():
                    tile = rows.tile(first + row - POSITIONS, 1)
                    for column in range(0, spec.v_head_dim, v_line):
                        tile.prefetch_v(0, column)
