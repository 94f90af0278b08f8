# SPDX-License-Identifier: Apache-2.0
"""The choice of positions by index keys: the largest of the scores of all positions.

Tiles of a few rows of Q, one after another. Tasks share the positions, which they score with the
products of attention over latent rows, and each keeps lists of the largest scores. Then they share
the rows, whose lists they merge.
"""

import math

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
from ..components.register_tile import round_up
from ..components.top_k import TopK, TopKLists, keys_of, llvm_helpers
from ..components.work import TASKS, cut, num_threads
from ..conversion import require_half_conversion
from ..shuffles import transpose
from ..simd import F32, broadcast, constant, import_llvm, index_temp, load, store, temp

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

    def num_seen(self, token):
        """Positions that a token sees."""
        return self.end - self.num_tokens + token + 1


@T.meta_class
class WeightedScores:
    """Scores of the tokens of a tile and a block of positions: sums over the heads.

    A score is no less than 0 before it is weighted.
    """

    def __init__(self, num_heads: int, lanes: int, max_rows: int):
        self.num_heads, self.lanes = num_heads, lanes
        self.run = math.gcd(num_heads, lanes)  # rows of a vector that surely are of one token
        rows = round_up(max_rows, lanes)
        # Rows behind the tile's belong to tokens that nobody asks for.
        self.sums = T.alloc_buffer((rows // num_heads + 1, POSITIONS), F32)
        self.weights = T.alloc_buffer((rows,), F32)
        self.keys = T.alloc_buffer((POSITIONS,), "int32")

    @inline
    def begin(self, tile: TokenTile, weights):
        """Take the weights of the heads."""
        lanes = T.meta_var(self.lanes)
        num_rows = T.meta_var(round_up(tile.num_rows, lanes))
        for row in range(num_rows):
            of_tile = T.meta_var(T.min(row, tile.num_rows - 1))
            self.weights[row] = weights[tile.token(of_tile), tile.query_head(of_tile)]
        for token in range((num_rows - 1) // self.num_heads + 1):
            self._clear(token)

    @inline
    def add(self, softmax: LaneSoftmax, block, num_seen):
        """Add the scores of a block of rows."""
        lanes = T.meta_var(self.lanes)
        for n in T.unroll(block.tile.vectors):
            for i in range((num_seen + lanes - 1) // lanes):
                self._add_square(softmax.scores, n, block.first_row + n * lanes, i * lanes)

    def _add_square(self, scores, n: int, row, position) -> None:
        """Add scores of a vector of rows and as many positions, along which they lie then."""
        lanes, zero = self.lanes, constant(0.0, self.lanes)
        of_rows = transpose([load(scores, (n, position + i, 0), lanes) for i in range(lanes)])
        for first in range(0, lanes, self.run):
            total = None
            for i in range(first, first + self.run):
                weight = broadcast(self.weights[row + i], lanes)
                product = T.max(of_rows[i], zero) * weight
                total = temp(product if total is None else total + product, lanes)
            at = (index_temp((row + first) // self.num_heads), position)
            store(self.sums, at, lanes, load(self.sums, at, lanes) + total)

    @inline
    def take(self, token, top: TopK, first, num_seen):
        """Offer the scores of a token, and forget them."""
        lanes = T.meta_var(self.lanes)
        for v in T.unroll(POSITIONS // lanes):
            keys = T.meta_var(keys_of(load(self.sums, (token, v * lanes), lanes), lanes))
            store(self.keys, (v * lanes,), lanes, keys, "int32")
        self._clear(token)
        top.offer(self.keys, 0, num_seen, lambda i: first + i)

    @inline
    def _clear(self, token):
        for v in T.unroll(POSITIONS // self.lanes):
            store(self.sums, (token, v * self.lanes), self.lanes, constant(0.0, self.lanes))


@inline
def score_tile(spec: KernelSpec, a: PagedInputs, ops, tile: TokenTile, weights, lists, tasks):
    """Score all positions of a tile's sequence up to its last token's.

    `tasks` has their number, and the first and last page of the sequence. A task has a list for
    each token.
    """
    num_blocks = (tile.end + POSITIONS - 1) // POSITIONS
    num_tasks, table = T.meta_var((tasks[0], tasks[1:]))
    max_tokens = T.meta_var(tile_tokens(spec))
    max_rows = T.meta_var(max_tokens * spec.num_qo_heads)
    for task in T.parallel(num_tasks, annotations=TASKS):
        rope = T.meta_var(NoRotation())
        ops.begin_task()
        rows = T.meta_var(LatentRows(spec, a.pages, a.page_values, *table, head=0))
        queries, kv = (
            LaneQueries(spec, ops, max_rows, a, rope, a.sm_scale),
            KvTile(spec, ops, rows),
        )
        softmax, blocks = LaneSoftmax(spec, ops, max_rows), RowBlocks(spec, ops)
        weighted = WeightedScores(spec.num_qo_heads, ops.lanes, max_rows)
        top = TopK(lists, ops.lanes)

        @inline
        def score(block, first, num_seen):
            softmax.score(queries, kv, block, first, 0, num_seen)
            weighted.add(softmax, block, num_seen)

        queries.begin_task()
        kv.begin_task()
        blocks.begin(tile.num_rows)
        for vector in range(blocks.num_vectors):
            queries.load(vector, tile)
        weighted.begin(tile, weights)
        for token in range(tile.num_tokens):
            lists.clear(task * max_tokens + token)
        for i in range(cut(num_blocks, task, num_tasks), cut(num_blocks, task + 1, num_tasks)):
            first = i * POSITIONS
            num_seen = T.min(POSITIONS, tile.end - first)
            kv.pack(first, tile.end, rope, 0)
            for index in range(blocks.count):
                if index < blocks.num_wide:
                    score(blocks.wide(index), first, num_seen)
                else:
                    score(blocks.narrow(index), first, num_seen)
            for token in range(tile.num_tokens):
                top.open(task * max_tokens + token)
                num_offered = T.min(POSITIONS, tile.num_seen(token) - first)
                weighted.take(token, top, first, num_offered)
                top.close(task * max_tokens + token)
        ops.end_task()


@inline
def choose(tile: TokenTile, lists, num_lists, lanes, positions, max_tokens):
    """Store what the tokens of a tile choose, of `num_lists` lists each."""
    num_tasks = T.if_then_else(num_lists > 1, T.min(num_lists, tile.num_tokens), 1)
    for task in T.parallel(num_tasks, annotations=TASKS):
        top = TopK(lists, lanes)
        begin = cut(tile.num_tokens, task, num_tasks)
        for token in range(begin, cut(tile.num_tokens, task + 1, num_tasks)):
            top.open(token)
            for i in range(num_lists - 1):
                top.offer_list((i + 1) * max_tokens + token)
            top.choose(positions, tile.first + token)


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
        most_tasks = num_threads()
        lists = TopKLists(most_tasks * max_tokens, k, longest)
        lists.begin()
        tile = TokenTile(num_heads)
        ops.begin([x for x in (a.q, a.pages) if str(x.dtype) == "bfloat16"])
        with ops.scope(), import_llvm(llvm_helpers(ops.lanes)):
            for b in range(batch_size):
                num_tokens = a.q_indptr[b + 1] - a.q_indptr[b]
                num_held = a.page_indptr[b + 1] - a.page_indptr[b]
                kv_len = (num_held - 1) * spec.page_size + a.length_info[b]
                table = T.meta_var((a.page_indptr[b], a.page_indptr[b + 1] - 1))
                for i in range((num_tokens + max_tokens - 1) // max_tokens):
                    tile.first = a.q_indptr[b] + i * max_tokens
                    tile.num_tokens = T.min(max_tokens, num_tokens - i * max_tokens)
                    tile.end = kv_len - num_tokens + i * max_tokens + tile.num_tokens
                    work = T.cast(tile.num_rows, "int64") * tile.end * rows.qk_head_dim
                    num_blocks = (tile.end + POSITIONS - 1) // POSITIONS
                    is_large = T.meta_var(work > SERIAL_WORK)
                    num_tasks = T.if_then_else(is_large, T.min(most_tasks, num_blocks), 1)
                    tasks = T.meta_var((num_tasks, *table))
                    score_tile(rows, a, ops, tile, head_weights, lists, tasks)
                    choose(tile, lists, num_tasks, ops.lanes, chosen, max_tokens)
        lists.free()

    return index_top_k
