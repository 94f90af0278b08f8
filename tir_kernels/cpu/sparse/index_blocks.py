# SPDX-License-Identifier: Apache-2.0
"""The choice of blocks of positions by index keys, each head for itself: max pooling.

Tiles of a few rows of Q, one after another. Tasks share the blocks, whose scores are the maxima of
their positions. Then they share the rows, which choose the largest scores.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...index_spec import IndexSpec
from ...layout import arrays_of, view_pages
from ...script import inline, prim_func
from ...signatures.sparse import INDEX_TOP_BLOCKS, IndexInputs
from ...spec import KernelSpec
from ..isa.matrices.register_tile import round_up
from ..isa.simd import F32, broadcast, constant, import_llvm, load, require_half_conversion, store
from ..tasks import TASKS, Workspace, cut, num_threads
from ..tiles.kv_operands import operands
from ..tiles.lane_softmax import LaneScores
from .index_scores import TokenTile, score_tile, tile_tokens
from .top_k import OFFERED, TopK, TopKLists, keys_of, llvm_helpers

ALWAYS = (1 << 31) - 1  # the key of a block that is always chosen


@T.meta_class
class PooledScores:
    """Scores of blocks of positions for the rows of a tile: the maximum over their positions.

    Parameters
    ----------
    spec : KernelSpec
    lanes : int
    keys : int32 Buffer ``[blocks, padded_rows]``
        Receives the scores, as keys of `TopK`.
    block_size : int32
    """

    def __init__(self, spec: KernelSpec, lanes: int, keys, block_size):
        self.lanes, self.keys, self.block_size = lanes, keys, block_size
        self.owns = T.alloc_buffer((padded_rows(spec, lanes),), "int32")  # positions of the rows
        self.maxima = T.alloc_buffer((padded_rows(spec, lanes),), F32)
        self.top = T.alloc_local((lanes,), F32)
        self.first_own, self.end = T.local_scalar("int32"), T.local_scalar("int32")

    @inline
    def begin(self, task, tile: TokenTile):
        """Begin a tile of rows."""
        lanes = T.meta_var(self.lanes)
        self.first_own = tile.num_seen(0) - 1
        self.end = tile.end
        for row in range(round_up(tile.num_rows, lanes)):
            own = tile.num_seen(T.min(row, tile.num_rows - 1) // tile.num_heads) - 1
            self.owns[row] = own
            self.maxima[row] = T.float32(float("-inf"))

    @inline
    def add(self, scores: LaneScores):
        """Take the scores of a block of rows."""
        first, num_seen = T.meta_var((scores.view.first, scores.view.num_seen))
        for n in T.unroll(scores.view.block.tile.vectors):
            row = scores.view.block.first_row + n * self.lanes
            start = T.int32(0)
            if first + num_seen - 1 > self.first_own:
                self._hide(scores, n, row)
            while start < num_seen:
                index = (first + start) // self.block_size
                stop = T.min(num_seen, (index + 1) * self.block_size - first)
                self._pool(scores, n, row, start, stop)
                if T.Or((index + 1) * self.block_size == first + stop, first + stop == self.end):
                    self._put(index, row)
                start = stop

    @inline
    def take(self, task, tile: TokenTile, first, num_seen):
        """Do nothing: `add` has taken them."""

    @inline
    def _hide(self, scores, n, row):
        """Hide the positions behind those of the rows of a vector."""
        lanes = T.meta_var(self.lanes)
        first, num_seen = T.meta_var((scores.view.first, scores.view.num_seen))
        begin = T.max(self.first_own + 1 - first, 0)
        for i in range(num_seen - begin):
            at = T.meta_var((n, begin + i, 0))
            own = T.meta_var(load(self.owns, (row,), lanes, "int32"))
            is_seen = T.meta_var(broadcast(first + begin + i, lanes) <= own)
            score = T.meta_var(load(scores.buffer, at, lanes))
            hidden = T.meta_var(T.Select(is_seen, score, constant(float("-inf"), lanes)))
            store(scores.buffer, at, lanes, hidden)

    @inline
    def _pool(self, scores, n, row, start, stop):
        """Take the positions ``start .. stop - 1`` of one block."""
        lanes = T.meta_var(self.lanes)
        store(self.top, (0,), lanes, load(self.maxima, (row,), lanes))
        for i in range(stop - start):
            score = T.meta_var(load(scores.buffer, (n, start + i, 0), lanes))
            store(self.top, (0,), lanes, T.max(load(self.top, (0,), lanes), score))
        store(self.maxima, (row,), lanes, load(self.top, (0,), lanes))

    @inline
    def _put(self, index, row):
        """Store the scores of a block, of whose positions all are taken."""
        lanes = T.meta_var(self.lanes)
        keys = T.meta_var(keys_of(load(self.maxima, (row,), lanes), lanes))
        store(self.keys, (T.cast(index, "int64"), row), lanes, keys, "int32")
        store(self.maxima, (row,), lanes, constant(float("-inf"), lanes))


def padded_rows(spec: KernelSpec, lanes: int) -> int:
    """Rows of a tile, in whole vectors."""
    return round_up(tile_tokens(spec) * spec.num_qo_heads, lanes)


@inline
def choose(tile: TokenTile, keys, lists: TopKLists, num_tasks, lanes, blocks, kept):
    """Store what the rows of a tile choose.

    `kept` has the size of a block, and how many of the first and of the last ones are always
    chosen.
    """
    block_size, init_blocks, local_blocks = T.meta_var(kept)
    for task in T.parallel(num_tasks, annotations=TASKS):
        top = TopK(lists, lanes)
        offered = T.alloc_buffer((OFFERED,), "int32")
        begin = cut(tile.num_rows, task, num_tasks)
        for row in range(begin, cut(tile.num_rows, task + 1, num_tasks)):
            own_block = (tile.num_seen(row // tile.num_heads) - 1) // block_size
            lists.clear(task)
            top.open(task)
            for i in range(own_block // OFFERED + 1):
                first = i * OFFERED
                num_offered = T.min(OFFERED, own_block + 1 - first)
                for j in range(num_offered):
                    block = first + j
                    is_kept = T.Or(block < init_blocks, block > own_block - local_blocks)
                    key = keys[T.cast(block, "int64"), row]
                    offered[j] = T.Select(is_kept, T.int32(ALWAYS), key)
                top.offer(offered, 0, num_offered, lambda n: first + n)
            top.choose(blocks, (tile.token(row), tile.query_head(row)))


def index_top_blocks(spec: IndexSpec):
    """Build the kernel `index_top_blocks`: heads choose the blocks whose scores are largest.

    The score of a block is the largest product of Q with a key of a position that the row sees, in
    float32. `blocks` are written: up to W blocks of those that a row sees, in order, then -1. Of
    equal scores the first blocks are chosen. `block_size` is a multiple of the page size. The first
    `init_blocks` and the last `local_blocks` blocks that a row sees, no more than W, are always
    among its choice.
    """
    rows = spec.products
    require_half_conversion(rows, rows.dtype, rows.kv_dtype)
    ops = operands(rows, rows.kv_dtype)

    @prim_func(arguments=INDEX_TOP_BLOCKS.of(rows, pages=spec.rows))
    def index_top_blocks(matched: IndexInputs):
        T.func_attr(attributes(rows))
        pages = T.meta_var(view_pages(matched.pages, spec.rows))
        a = T.meta_var(replace(matched, pages=pages, sm_scale=T.float32(1)))
        block_size = T.meta_var(a.block_size)
        most_blocks = T.int32(1)
        for b in range(a.batch_size):
            num_held = a.page_indptr[b + 1] - a.page_indptr[b]
            most_blocks = T.max(most_blocks, (num_held * spec.page_size - 1) // block_size + 1)
        most_tasks = num_threads()
        scores = T.meta_var(
            Workspace(most_blocks, (padded_rows(rows, ops.lanes),), "int32", "scores of blocks")
        )
        lists = TopKLists(most_tasks, a.blocks.shape[2], most_blocks)
        lists.begin()
        tile = TokenTile(rows, a)
        make_sink = T.meta_var(lambda: PooledScores(rows, ops.lanes, scores.buffer, block_size))
        kept = T.meta_var((block_size, a.init_blocks, a.local_blocks))
        ops.begin([a.q, *arrays_of(a.pages)])
        with ops.scope(), import_llvm(llvm_helpers(ops.lanes)):
            for b in range(a.batch_size):
                tile.begin_sequence(b)
                for i in range(tile.count):
                    tile.begin(b, i)
                    num_blocks = (tile.end + block_size - 1) // block_size
                    most = T.meta_var(T.min(most_tasks, num_blocks))
                    num_tasks = T.if_then_else(tile.is_large, most, 1)
                    score_tile(rows, a, ops, tile, num_tasks, block_size, make_sink)
                    num_choosing = T.if_then_else(
                        tile.is_large, T.min(most_tasks, tile.num_rows), 1
                    )
                    choose(tile, scores.buffer, lists, num_choosing, ops.lanes, a.blocks, kept)
        lists.free()
        scores.free()

    return index_top_blocks
