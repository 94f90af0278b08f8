# SPDX-License-Identifier: Apache-2.0
"""A tile of K and V, packed for register tiles, while the next one is prefetched."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.register_tile import UNROLL, ColumnTiles, Panels, round_up
from ..isa.operands import ROWS_AT_ONCE, copy_v, transpose_k
from ..isa.simd import add, broadcast, elements_per_line, load, reduce_lanes, store

POSITIONS = 64  # of a tile


@T.meta_class
class KvTile:
    """`POSITIONS` positions of K, transposed, and of V as it lies.

    Positions of V past the end of the columns that are attended to, or before their begin, are
    zeros; K holds anything there, and the mask hides those columns.

    A hidden position has a weight of 0, which hides numbers only: 0 times NaN, or times infinity,
    is NaN. Tiles of which all rows see every position need no care. The others, those of a causal
    diagonal and at the ends of a window, are looked through once by `find_non_finite`. Where one
    holds NaN or infinity, which is rare, rows are summed one by one, over what each of them sees.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    tiles : ColumnTiles
        For the columns of V.

    Attributes
    ----------
    k, v : Panels
        ``[element, position]`` and ``[element of positions, column]``.
    has_non_finite : int32 variable
        Whether V holds NaN or infinity, if `find_non_finite` had to look.
    """

    def __init__(self, spec: KernelSpec, ops, tiles: ColumnTiles):
        self.spec, self.ops, self.lanes, self.tiles = spec, ops, spec.target.lanes, tiles
        self.depth, width = spec.qk_head_dim // ops.values_per_element, tiles.wide.width
        self.padded_depth = round_up(self.depth, tiles.step)  # behind the elements there are zeros
        self.k = Panels(self.padded_depth, POSITIONS, width, ops.dtype)
        self.positions_at_once = max(ROWS_AT_ONCE, tiles.step * ops.values_per_element)  # of V
        self.v = Panels(POSITIONS // ops.values_per_element, spec.v_head_dim, width, ops.dtype)
        self.num_packed = T.local_scalar("int32")  # positions of V
        self.has_non_finite = T.local_scalar("int32")
        self.found = T.local_scalar("float32")
        self.next_first = T.local_scalar("int32")
        self.next_end = T.local_scalar("int32")
        self.rows_per_product = T.local_scalar("int32")
        # Rows of the next tile; those of V are a part of K's with MLA.
        self.num_prefetched = POSITIONS if spec.is_latent else 2 * POSITIONS

    @inline
    def begin_task(self):
        """Let the elements behind those of K be zeros."""
        if self.padded_depth > self.depth:
            zeros = T.meta_var(broadcast(T.cast(0, self.ops.dtype), self.lanes))
            for row in range(self.padded_depth - self.depth):
                for i in T.unroll(POSITIONS // self.lanes):
                    at = T.meta_var(self.k.at(self.depth + row, i * self.lanes))
                    store(*at, self.lanes, zeros, self.ops.dtype)

    def begin_rows(self, rows) -> None:
        """Take K and V from the rows of another sequence and KV head."""
        self.rows = rows

    @inline
    def pack_k(self, first, end):
        """Pack the positions of K from `first` on that are before `end`."""
        count = T.min(POSITIONS, end - first)
        for i in range((count + self.lanes - 1) // self.lanes):
            column = T.meta_var(i * self.lanes)
            transpose_k(self.ops, self.rows, first + column, self.k.at, self.depth, column)

    @inline
    def pack_v(self, first, end, begin=None):
        """Pack the positions of V from `first` on that are before `end`, and not before `begin`."""
        count = T.min(POSITIONS, end - first)
        self.num_packed = round_up(count, self.positions_at_once)
        columns = T.meta_var(self.spec.v_head_dim)
        copy_v(self.ops, self.rows, first, self.v.at, columns, self.num_packed, end, begin)

    @inline
    def find_non_finite(self, is_masked):
        """Look through V, if some rows do not see all of the tile."""
        self.has_non_finite = 0
        if is_masked:
            self.found = T.float32(0)
            self.tiles.in_registers.each(self._add_zeros_times_v)
            self.has_non_finite = T.if_then_else(self.found == T.float32(0), 0, 1)

    @inline
    def _add_zeros_times_v(self, tile, column):
        zero = T.broadcast(T.cast(0, self.ops.dtype), tile.lanes)  # a constant would be folded
        for u in T.unroll(UNROLL):
            for j in T.unroll(tile.vectors):
                tile.sums[tile.at(u, j)] = T.broadcast(T.float32(0), tile.lanes)
        for step in range(self.num_packed // (self.ops.values_per_element * UNROLL)):
            for u in T.unroll(UNROLL):
                for j in T.unroll(tile.vectors):
                    at = T.meta_var(self.v.at(step * UNROLL + u, column + j * tile.lanes))
                    value = T.meta_var(load(*at, tile.lanes, self.ops.dtype))
                    sums = T.meta_var(tile.sums[tile.at(u, j)])
                    tile.sums[tile.at(u, j)] = self.ops.fma(sums, value, zero, tile.lanes)
        for u in T.unroll(UNROLL):
            for j in T.unroll(tile.vectors):
                self.found += reduce_lanes(tile.sums[tile.at(u, j)], tile.lanes, add)

    @inline
    def begin_prefetch(self, first, end, num_blocks):
        """Divide the rows of the tile at `first` among the products of `num_blocks` blocks."""
        num_products = num_blocks * (POSITIONS // self.tiles.wide.width)
        self.next_first = first
        self.next_end = end
        self.rows_per_product = (self.num_prefetched + num_products - 1) // num_products

    @inline
    def prefetch(self, product):
        """Prefetch some rows of K of the next tile, then of V.

        Each product is preceded by a few, because asking for much at once would wait for memory.
        """
        begin = product * self.rows_per_product
        count = T.min(self.rows_per_product, self.num_prefetched - begin)
        if self.next_first < self.next_end:
            for i in range(count):
                row = begin + i
                if row < POSITIONS:
                    tile = T.meta_var(self.rows.tile(self.next_first + row, 1))
                    _prefetch_row(tile.prefetch_k, self.spec.qk_head_dim, self.spec.k_dtype)
                else:
                    tile = T.meta_var(self.rows.tile(self.next_first + row - POSITIONS, 1))
                    _prefetch_row(tile.prefetch_v, self.spec.v_head_dim, self.spec.v_dtype)


def _prefetch_row(prefetch, width: int, dtype: str) -> None:
    for column in range(0, width, elements_per_line(dtype)):
        prefetch(0, column)
