# SPDX-License-Identifier: Apache-2.0
"""O of the rows of a tile, from the first positions that they see to the stored results."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.register_tile import ColumnTiles, round_up
from ..isa.simd import F32, broadcast, constant, store, store_row
from ..softmax.output import Output
from .query_tile import BLOCKS, QueryTile
from .row_bounds import TileView
from .tile_softmax import TileSoftmax

UNSEEN, BEGUN, STORED = range(3)  # progress of a block


@T.meta_class
class OutputTile:
    """O of the rows of a `QueryTile`, not yet divided by the sums of weights.

    A block is stored with the last tile of K and V that it sees, while its sums are in registers::

        q.begin(first_token, num_tokens, head)
        o.begin()
        for every tile of K and V, and all blocks of rows that see some of it:
            o.begin_view(view)
            ...  # scores and weights
            o.finish(view)
            products.pv(o, weights, kv)
        o.end()

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments, with a `rope`
    q : QueryTile
    tiles : ColumnTiles
        For the columns of V, with rows of a block.
    softmax : TileSoftmax

    Attributes
    ----------
    o : float32 Buffer ``[row, column]``
    """

    def __init__(self, spec: KernelSpec, a, q: QueryTile, tiles: ColumnTiles, softmax: TileSoftmax):
        self.spec, self.a, self.q, self.softmax = spec, a, q, softmax
        self.output, self.block_rows = Output(spec, a), q.block_rows
        # Rows that are rotated back first are stored at the end.
        self.stores_early = not a.rope.restores
        num_rows = q.max_blocks * q.block_rows
        self.o = T.alloc_buffer((num_rows, round_up(spec.v_head_dim, tiles.column_step)), F32)
        self.inverse = T.alloc_buffer((BLOCKS * q.block_rows,), F32)
        self.progress = T.alloc_buffer((q.max_blocks,), "int32")
        self.is_new = T.local_scalar("int32")  # whether the blocks of a view have no sums yet

    @inline
    def begin(self):
        """Start other rows, whose softmax has seen nothing yet."""
        for block in range(self.q.num_blocks):
            self.softmax.reset(block)
            self.progress[block] = T.int32(UNSEEN)

    @inline
    def begin_view(self, view: TileView):
        """Note that some blocks see some positions."""
        self.is_new = T.if_then_else(self.progress[view.block] == UNSEEN, 1, 0)
        if self.is_new == 1:
            for j in range(view.count):
                self.progress[view.block + j] = T.int32(BEGUN)

    @inline
    def finish(self, view: TileView):
        """Store LSE of the blocks that see no column behind the tile; `put` will store their O."""
        if self.stores_early:
            for j in range(view.count):
                if view.completes(j):
                    self.progress[view.block + j] = T.int32(STORED)
                    for i in range(self.block_rows):
                        row = j * self.block_rows + i
                        blocks = T.meta_var(self.softmax.blocks)
                        total = blocks.row_sum[blocks.index(view.block + j, i)]
                        self._normalize(row, view.first_row + row, total)

    @inline
    def _normalize(self, row, tile_row, total):
        """Store LSE of a row of the tile, and keep the factor of its sums."""
        top, _ = T.meta_var(self.softmax.state(tile_row))
        head = T.meta_var(self.q.head_of(tile_row))
        factor, log = T.meta_var(self.output.normalizer(head, top, total))
        self.inverse[row] = factor
        self.q.locate(tile_row)
        self.output.put_lse(self.q.token, self.q.query_head, log)

    @inline
    def load_rescaled(self, tile, row, column, rescale):
        """Start the sums of a register tile from those of a block, whose first row is `row`.

        `rescale` is buffer and index of the factor of its first row.
        """
        if self.is_new == 1:
            tile.clear()
        else:
            tile.load_scaled(self.o, row, column, *rescale)

    @inline
    def put(self, tile, row, column, completes, first):
        """Take the sums of a register tile, divided and stored where the block `completes`.

        Its first row is `row` of the tile, and `first` of the view.
        """
        if self.stores_early and completes:
            tile.take_sums()
            for i in T.unroll(self.block_rows):
                self.q.locate(row + i)
                for k in T.unroll(tile.vectors):
                    at = T.meta_var((self.q.token, self.q.query_head, column + k * tile.lanes))
                    inverse = T.meta_var(broadcast(self.inverse[first + i], tile.lanes))
                    store(self.a.o, at, tile.lanes, tile.sums[tile.at(i, k)] * inverse)
        else:
            tile.put(self.o, row, column)

    @inline
    def end(self):
        """Store rows that are not stored: those that see nothing, or are rotated back first."""
        for block in range(self.q.num_blocks):
            if self.progress[block] != STORED:
                for i in range(self.block_rows):
                    row = block * self.block_rows + i
                    if self.progress[block] == UNSEEN:
                        self.clear_row(row)
                    self.a.rope.restore(self.o, row)
                    self.store_row(row)

    @inline
    def store_row(self, row):
        """Divide a row by its sum of weights, and store it."""
        self.q.locate(row)
        top, total = T.meta_var(self.softmax.state(row))
        self.output.finish(self.q.token, self.q.query_head, self.o, row, top, total)

    def clear_row(self, row) -> None:
        """Forget all positions that a row has seen."""
        width, lanes = self.spec.v_head_dim, self.spec.target.lanes
        store_row(self.o, (row,), width, lanes, lambda i, n: constant(0.0, n))
