# SPDX-License-Identifier: Apache-2.0
"""The choice of positions by index keys: scores of all positions, then the largest ones.

A few rows of Q at a time, whose scores of all positions lie in memory: tasks share the positions
first, with the products of attention over latent rows, and then the rows.
"""

from tvm.script import tirx as T

from ...define import attributes
from ...index_spec import IndexSpec
from ...script import inline, prim_func
from ...signatures.arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from ...signatures.inputs import PagedInputs
from ...spec import KernelSpec
from ..components.inline_rope import NoRotation
from ..components.kv_operands import operands
from ..components.kv_rows import LatentRows
from ..components.kv_tile import POSITIONS, KvTile
from ..components.lane_rows import LaneQueries, RowBlocks
from ..components.lane_softmax import LaneSoftmax
from ..components.top_k import TileScores, TopK
from ..components.work import TASKS, cut, num_threads
from ..conversion import require_half_conversion
from ..simd import F32, constant, load, store

TILE_ROWS = 256  # rows of Q, with all their heads, that share packed keys
SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


@T.meta_class
class TokenTile:
    """Some tokens of a sequence, with all their index heads."""

    def __init__(self, num_heads: int):
        self.num_heads = num_heads
        self.first, self.num_tokens, self.end = (T.local_scalar("int32") for _ in range(3))

    @property
    def num_rows(self):
        """Return the rows of the tile: tokens times heads."""
        return self.num_tokens * self.num_heads

    def token(self, row):
        """The row of Q of a row of the tile."""
        return self.first + row // self.num_heads

    def query_head(self, row):
        """The index head of a row of the tile."""
        return row % self.num_heads


@T.meta_class
class WeightedScores:
    """Scores of a block of rows times the weights of their heads, for all rows of a tile.

    They are ``[vector, position, lane]``: no less than 0 before they are weighted.
    """

    def __init__(self, num_heads: int, lanes: int, max_rows: int):
        self.num_heads, self.lanes = num_heads, lanes
        vectors = -(-max_rows // lanes)
        self.values = T.alloc_buffer((vectors, POSITIONS, lanes), F32)
        self.weights = T.alloc_buffer((vectors * lanes,), F32)

    @inline
    def begin(self, tile: TokenTile, weights):
        """Take the weights of the heads."""
        for row in range(tile.num_rows):
            self.weights[row] = weights[tile.token(row), tile.query_head(row)]

    @inline
    def take(self, softmax: LaneSoftmax, block, num_seen):
        """Take the scores of a block of rows."""
        lanes = T.meta_var(self.lanes)
        for n in T.unroll(block.tile.vectors):
            for i in range(num_seen):
                weight = T.meta_var(load(self.weights, (block.first_row + n * lanes,), lanes))
                score = T.meta_var(load(softmax.scores, (n, i, 0), lanes))
                weighted = T.meta_var(T.max(score, constant(0.0, lanes)) * weight)
                store(self.values, (block.vector + n, i, 0), lanes, weighted)

    @inline
    def add_up(self, scores, tile: TokenTile, first, num_seen):
        """Store the sum over the heads, for each token and position."""
        lanes, heads = T.meta_var((self.lanes, self.num_heads))
        for token in range(tile.num_tokens):
            for i in range(num_seen):
                total = T.float32(0)
                for head in range(heads):
                    row = T.meta_var(token * heads + head)
                    total += self.values[row // lanes, i, row % lanes]
                scores.buffer[scores.at(token, first + i)] = total


@inline
def score_tile(spec: KernelSpec, a: PagedInputs, ops, tile: TokenTile, weights, scores, table):
    """Score all positions of a tile's sequence up to its last token's."""
    num_blocks = (tile.end + POSITIONS - 1) // POSITIONS
    work = T.cast(tile.num_rows, "int64") * tile.end * spec.qk_head_dim
    num_tasks = T.if_then_else(work > SERIAL_WORK, T.min(num_threads(), num_blocks), 1)
    max_rows = T.meta_var(tile_tokens(spec) * spec.num_qo_heads)
    for task in T.parallel(num_tasks, annotations=TASKS):
        rope = T.meta_var(NoRotation())
        ops.begin_task()
        rows = T.meta_var(LatentRows(spec, a.pages, a.page_values, *table, head=0))
        queries, kv = (
            LaneQueries(spec, ops, max_rows, a, rope, a.sm_scale),
            KvTile(spec, ops, rows),
        )
        softmax, blocks = LaneSoftmax(spec, ops, max_rows), RowBlocks(spec, ops)
        weighted = WeightedScores(spec.num_qo_heads, ops.lanes, max_rows + 2 * ops.lanes)

        @inline
        def score(block, first, num_seen):
            softmax.score(queries, kv, block, first, 0, num_seen)
            weighted.take(softmax, block, num_seen)

        queries.begin_task()
        kv.begin_task()
        blocks.begin(tile.num_rows)
        for vector in range(blocks.num_vectors):
            queries.load(vector, tile)
        weighted.begin(tile, weights)
        for i in range(cut(num_blocks, task, num_tasks), cut(num_blocks, task + 1, num_tasks)):
            first = i * POSITIONS
            num_seen = T.min(POSITIONS, tile.end - first)
            kv.pack(first, tile.end, rope, 0)
            for index in range(blocks.count):
                if index < blocks.num_wide:
                    score(blocks.wide(index), first, num_seen)
                else:
                    score(blocks.narrow(index), first, num_seen)
            weighted.add_up(scores, tile, first, num_seen)
        ops.end_task()


def tile_tokens(spec: KernelSpec) -> int:
    """Tokens of a tile."""
    return max(1, min(64, TILE_ROWS // spec.num_qo_heads))


def index_top_k(spec: IndexSpec):
    """Build the kernel `index_top_k`: rows choose the positions whose scores are largest.

    The score of a position is the sum over the heads of ``weight * max(0, scale * (q . key))``, in
    float32. Arguments are those of `signatures.inputs`, `weights`, float32 ``[T, num_heads]``, and
    `positions`, int32 ``[T, k]``, written: up to k positions of those that a row sees, in order,
    then -1. Of equal scores the first positions are chosen.
    """
    rows, num_heads = spec.products, spec.num_heads
    require_half_conversion(rows, rows.dtype, rows.kv_dtype)
    match_rows, match_pages = row_matcher(rows), page_matcher(rows)
    ops = operands(rows, rows.kv_dtype)
    max_tokens = tile_tokens(rows)

    @prim_func
    def index_top_k(
        q: T.handle,
        q_indptr: T.handle,
        weights: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        positions: T.handle,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(rows))
        batch_size, num_rows, num_pages, num_entries, k = sizes(5)
        a = T.meta_var(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, spec.dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, batch_size),
                o=None,
                lse=None,
                sm_scale=sm_scale,
            )
        )
        head_weights = match_float32(weights, num_rows, num_heads)
        chosen = match_int32(positions, num_rows, k)
        longest = T.int32(1)
        for b in range(batch_size):
            longest = T.max(longest, (a.page_indptr[b + 1] - a.page_indptr[b]) * spec.page_size)
        scores = TileScores(max_tokens, longest)
        scores.begin()
        tile = TokenTile(num_heads)
        ops.begin([x for x in (a.q, a.pages) if str(x.dtype) == "bfloat16"])
        with ops.scope():
            for b in range(batch_size):
                num_tokens = a.q_indptr[b + 1] - a.q_indptr[b]
                num_held = a.page_indptr[b + 1] - a.page_indptr[b]
                kv_len = (num_held - 1) * spec.page_size + a.length_info[b]
                table = T.meta_var((a.page_indptr[b], a.page_indptr[b + 1] - 1))
                for i in range((num_tokens + max_tokens - 1) // max_tokens):
                    tile.first = a.q_indptr[b] + i * max_tokens
                    tile.num_tokens = T.min(max_tokens, num_tokens - i * max_tokens)
                    tile.end = kv_len - num_tokens + i * max_tokens + tile.num_tokens
                    score_tile(rows, a, ops, tile, head_weights, scores, table)
                    is_large = T.meta_var(tile.num_tokens * tile.end > 1 << 14)
                    num_tasks = T.if_then_else(is_large, T.min(num_threads(), tile.num_tokens), 1)
                    for task in T.parallel(num_tasks, annotations=TASKS):
                        top = TopK(scores, chosen, k)
                        begin = cut(tile.num_tokens, task, num_tasks)
                        for token in range(begin, cut(tile.num_tokens, task + 1, num_tasks)):
                            count = tile.end - tile.num_tokens + token + 1
                            top.choose(token, count, tile.first + token)
        scores.memory.free()

    return index_top_k
