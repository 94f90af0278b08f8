# SPDX-License-Identifier: Apache-2.0
"""Sums of weighted rows of V in the tiles of AMX, of rows that lie along lanes until then."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.amx import SIDE
from ..isa.matrices.amx_tile import NarrowAmxTile
from ..isa.matrices.register_tile import ColumnTiles, round_up
from ..isa.simd import F32, broadcast, constant, load, store
from .kv_tile import POSITIONS, KvTile, rounded
from .lane_rows import LaneMask, RowBlock, transpose_block
from .lane_softmax import LaneSoftmax, LaneSums


@T.meta_class
class TileSums(LaneSums):
    """As `LaneSums`, but rows of `o` from the begin on: ``O = O * decay + P V``.

    The weights of a block are transposed, which is less than to transpose V.
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.ops, self.lanes, self.width = ops, ops.lanes, spec.v_head_dim
        vectors = -(-max_rows // self.lanes)
        self.padded_width = round_up(self.width, SIDE)
        self.o = T.alloc_buffer((vectors * self.lanes, self.padded_width), F32)
        self.weights = T.alloc_buffer((2 * SIDE, POSITIONS // ops.values_per_element), ops.dtype)
        self.wide = ColumnTiles(ops, spec.target, self.width)
        self.narrow = ColumnTiles(ops, spec.target, self.width, NarrowAmxTile)

    @inline
    def clear(self, vector):
        """Forget all positions."""
        for i in range(self.lanes):
            for j in range(self.padded_width // self.lanes):
                at = T.meta_var((vector * self.lanes + i, j * self.lanes))
                store(self.o, at, self.lanes, constant(0.0, self.lanes))

    @inline
    def add(self, kv: KvTile, softmax: LaneSoftmax, block: RowBlock, first, num_seen):
        """``O = O * decay + P V`` over the first `num_seen` positions of a tile."""
        # Whole steps of the product: the weights behind those that `softmax` knows are zeros.
        depth = kv.rounded(num_seen) // self.ops.values_per_element
        for n in T.unroll(block.tile.vectors):
            for k in range(depth - rounded(num_seen) // self.ops.values_per_element):
                zeros = T.meta_var(broadcast(T.cast(0, self.ops.dtype), self.lanes))
                at = T.meta_var((n, rounded(num_seen) // self.ops.values_per_element + k, 0))
                store(softmax.weights, at, self.lanes, zeros, self.ops.dtype)
            for step in range(depth // SIDE):
                self._transpose(softmax, n, step * SIDE)
        tiles = T.meta_var(self.wide if block.tile.vectors == 2 else self.narrow)
        tiles.each(lambda tile, column: self._add(tile, column, kv, softmax, block, depth))

    def _transpose(self, softmax, n, element) -> None:
        """Turn the weights of a step of a vector of rows into rows."""
        dtype = self.ops.dtype
        transpose_block(
            lambda row, column, lanes: load(
                softmax.weights, (n, element + row, column), lanes, dtype
            ),
            lambda column, row, lanes, value: store(
                self.weights, (n * SIDE + column, element + row), lanes, value, dtype
            ),
            SIDE,
            SIDE,
            dtype,
        )

    @inline
    def _add(self, tile, column, kv, softmax, block, depth):
        tile.load_scaled(self.o, block.first_row, column, softmax.decay, 0)
        tile.multiply(self.weights, 0, kv.rows_of_v, column, depth)
        tile.put(self.o, block.first_row, column)

    @inline
    def add_seen(
        self, kv: KvTile, softmax: LaneSoftmax, block: RowBlock, first, num_seen, mask: LaneMask
    ):
        """Do what `add` does where V is not finite: leave out what a row does not see."""
        lane_sums = T.alloc_buffer((self.lanes,), F32)
        for column in range(self.width):
            for n in T.unroll(block.tile.vectors):
                row = T.meta_var(block.first_row + n * self.lanes)
                for i in range(self.lanes):
                    lane_sums[i] = self.o[row + i, column]
                visible = T.meta_var(lambda position, row=row: mask.visible(first, position, row))
                self.add_column(lane_sums, (0,), kv, softmax, n, column, num_seen, visible)
                for i in range(self.lanes):
                    self.o[row + i, column] = lane_sums[i]

    def transpose(self, num_vectors) -> None:
        """They are rows."""


def sums_of(spec: KernelSpec, ops, max_rows: int) -> LaneSums:
    """Make the sums that suit the operands of a kernel."""
    return (TileSums if ops.product_tile else LaneSums)(spec, ops, max_rows)
