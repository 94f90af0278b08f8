# SPDX-License-Identifier: Apache-2.0
"""Products of attention in the tiles of AMX, with rows that lie along lanes until O is summed."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.amx import SIDE
from ..isa.matrices.amx_tile import NarrowAmxTile
from ..isa.matrices.register_tile import ColumnTiles, round_up
from ..isa.simd import F32, broadcast, constant, load, store
from .kv_tile import POSITIONS
from .lane_kv import LaneKv
from .lane_products import LaneProducts, LaneSums
from .lane_rows import LaneMask, transpose_block
from .lane_softmax import LaneWeights


@T.meta_class
class RowSums(LaneSums):
    """O, not yet divided by the sums of weights, as rows of `o` from the begin on."""

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.lanes, self.width = ops.lanes, spec.v_head_dim
        vectors = -(-max_rows // self.lanes)
        self.padded_width = round_up(self.width, SIDE)
        self.o = T.alloc_buffer((vectors * self.lanes, self.padded_width), F32)

    @inline
    def clear(self, vector):
        """Forget all positions."""
        for i in range(self.lanes):
            for j in range(self.padded_width // self.lanes):
                at = T.meta_var((vector * self.lanes + i, j * self.lanes))
                store(self.o, at, self.lanes, constant(0.0, self.lanes))

    def transpose(self, num_vectors) -> None:
        """They are rows."""


@T.meta_class
class AmxProducts(LaneProducts):
    """``S^T = K Q^T`` and ``O = O * rescale + P V``.

    The weights of a block are transposed, which is less than to transpose V.
    """

    sums = RowSums

    def __init__(self, spec: KernelSpec, ops):
        super().__init__(spec, ops)
        self.weights = T.alloc_buffer((2 * SIDE, POSITIONS // ops.values_per_element), ops.dtype)
        self.wide = ColumnTiles(ops, spec.target, self.width)
        self.narrow = ColumnTiles(ops, spec.target, self.width, NarrowAmxTile)

    @inline
    def pv(self, o: RowSums, weights: LaneWeights, kv: LaneKv):
        """Add the weighted rows of V to `o`."""
        block = T.meta_var(weights.view.block)
        # Whole steps of the product: the weights behind those of the softmax are zeros.
        depth = kv.rounded(weights.view.num_seen) // self.ops.values_per_element
        num_elements = T.meta_var(weights.view.num_positions // self.ops.values_per_element)
        for n in T.unroll(block.tile.vectors):
            for k in range(depth - num_elements):
                zeros = T.meta_var(broadcast(T.cast(0, self.ops.dtype), self.lanes))
                at = T.meta_var((n, num_elements + k, 0))
                store(weights.buffer, at, self.lanes, zeros, self.ops.dtype)
            for step in range(depth // SIDE):
                self._transpose(weights, n, step * SIDE)
        tiles = T.meta_var(self.wide if block.tile.vectors == 2 else self.narrow)
        tiles.each(lambda tile, column: self._add(tile, column, o, weights, kv, depth))

    def _transpose(self, weights, n, element) -> None:
        """Turn the weights of a step of a vector of rows into rows."""
        dtype = self.ops.dtype
        transpose_block(
            lambda row, column, lanes: load(
                weights.buffer, (n, element + row, column), lanes, dtype
            ),
            lambda column, row, lanes, value: store(
                self.weights, (n * SIDE + column, element + row), lanes, value, dtype
            ),
            SIDE,
            SIDE,
            dtype,
        )

    @inline
    def _add(self, tile, column, o, weights, kv, depth):
        first_row = T.meta_var(weights.view.block.first_row)
        tile.load_scaled(o.o, first_row, column, weights.rescale, 0)
        tile.multiply(self.weights, 0, kv.rows_of_v, column, depth)
        tile.put(o.o, first_row, column)

    @inline
    def pv_seen(self, o: RowSums, weights: LaneWeights, kv: LaneKv, mask: LaneMask):
        """Do what `pv` does where V is not finite: leave out what a row does not see."""
        view, block = T.meta_var((weights.view, weights.view.block))
        lane_sums = T.alloc_buffer((self.lanes,), F32)
        for column in range(self.width):
            for n in T.unroll(block.tile.vectors):
                row = T.meta_var(block.first_row + n * self.lanes)
                for i in range(self.lanes):
                    lane_sums[i] = o.o[row + i, column]
                visible = T.meta_var(
                    lambda position, row=row: mask.visible(view.first, position, row)
                )
                self.add_column(lane_sums, (0,), kv, weights, n, column, visible)
                for i in range(self.lanes):
                    o.o[row + i, column] = lane_sums[i]


def products_of(spec: KernelSpec, ops) -> LaneProducts:
    """Make the products that suit the operands of a kernel."""
    return (AmxProducts if ops.product_tile else LaneProducts)(spec, ops)
