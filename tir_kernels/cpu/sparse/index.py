# SPDX-License-Identifier: Apache-2.0
"""The choice of positions by index keys: the largest of the scores of all positions.

Tiles of a few rows of Q, one after another. Tasks share the positions, which they score with the
products of attention over latent rows, and each keeps lists of the largest scores. Then they share
the rows, whose lists they merge.
"""

import math
from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...index_spec import IndexSpec
from ...layout import arrays_of, view_pages
from ...script import inline, prim_func
from ...signatures.sparse import INDEX_TOP_K, IndexInputs
from ...spec import KernelSpec
from ..isa.matrices.register_tile import round_up
from ..isa.shuffles import transpose
from ..isa.simd import (
    F32,
    broadcast,
    constant,
    import_llvm,
    index_temp,
    load,
    require_half_conversion,
    store,
    temp,
)
from ..tasks import TASKS, cut, num_threads
from ..tiles.kv_operands import operands
from ..tiles.kv_tile import POSITIONS
from ..tiles.lane_softmax import LaneScores
from .index_scores import TokenTile, score_tile, tile_tokens
from .top_k import TopK, TopKLists, keys_of, llvm_helpers


@T.meta_class
class WeightedScores:
    """Scores of the tokens of a tile and a block of positions: sums over the heads.

    A score is no less than 0 before it is weighted.

    Parameters
    ----------
    spec : KernelSpec
    lanes : int
    weights : float32 Buffer ``[rows, num_heads]``
        Of the heads.
    lists : TopKLists
        A list for each task and token, which takes the scores.
    """

    def __init__(self, spec: KernelSpec, lanes: int, weights, lists: TopKLists):
        self.num_heads, self.lanes, self.head_weights = spec.num_qo_heads, lanes, weights
        self.lists, self.max_tokens = lists, tile_tokens(spec)
        num_heads, max_rows = self.num_heads, self.max_tokens * self.num_heads
        self.run = math.gcd(num_heads, lanes)  # rows of a vector that surely are of one token
        rows = round_up(max_rows, lanes)
        # Rows behind the tile's belong to tokens that nobody asks for.
        self.sums = T.alloc_buffer((rows // num_heads + 1, POSITIONS), F32)
        self.weights = T.alloc_buffer((rows,), F32)
        self.keys = T.alloc_buffer((POSITIONS,), "int32")
        self.top = TopK(lists, lanes)

    @inline
    def begin(self, task, tile: TokenTile):
        """Take the weights of the heads, and clear the lists."""
        weights = T.meta_var(self.head_weights)
        lanes = T.meta_var(self.lanes)
        num_rows = T.meta_var(round_up(tile.num_rows, lanes))
        for row in range(num_rows):
            of_tile = T.meta_var(T.min(row, tile.num_rows - 1))
            self.weights[row] = weights[tile.token(of_tile), tile.query_head(of_tile)]
        for token in range((num_rows - 1) // self.num_heads + 1):
            self._clear(token)
        for token in range(tile.num_tokens):
            self.lists.clear(task * self.max_tokens + token)

    @inline
    def add(self, scores: LaneScores):
        """Add the scores of a block of rows."""
        lanes, block = T.meta_var((self.lanes, scores.view.block))
        for n in T.unroll(block.tile.vectors):
            for i in range((scores.view.num_seen + lanes - 1) // lanes):
                self._add_square(scores.buffer, n, block.first_row + n * lanes, i * lanes)

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
    def take(self, task, tile: TokenTile, first, num_seen):
        """Offer the scores of all tokens to their lists, and forget them."""
        for token in range(tile.num_tokens):
            self.top.open(task * self.max_tokens + token)
            self._take_token(token, first, T.min(num_seen, tile.num_seen(token) - first))
            self.top.close(task * self.max_tokens + token)

    @inline
    def _take_token(self, token, first, num_seen):
        lanes = T.meta_var(self.lanes)
        for v in T.unroll(POSITIONS // lanes):
            keys = T.meta_var(keys_of(load(self.sums, (token, v * lanes), lanes), lanes))
            store(self.keys, (v * lanes,), lanes, keys, "int32")
        self._clear(token)
        self.top.offer(self.keys, 0, num_seen, lambda i: first + i)

    @inline
    def _clear(self, token):
        for v in T.unroll(POSITIONS // self.lanes):
            store(self.sums, (token, v * self.lanes), self.lanes, constant(0.0, self.lanes))


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
            top.choose(positions, (tile.first + token,))


def index_top_k(spec: IndexSpec):
    """Build the kernel `index_top_k`: rows choose the positions whose scores are largest.

    The score of a position is the sum over the heads of ``weight * max(0, scale * (q . key))``, in
    float32. `positions` are written: up to W positions of those that a row sees, in order, then -1.
    Of equal scores the first positions are chosen.
    """
    rows = spec.products
    require_half_conversion(rows, rows.dtype, rows.kv_dtype)
    ops = operands(rows, rows.kv_dtype)
    max_tokens = tile_tokens(rows)

    @prim_func(arguments=INDEX_TOP_K.of(rows, pages=spec.rows))
    def index_top_k(matched: IndexInputs):
        T.func_attr(attributes(rows))
        a = T.meta_var(replace(matched, pages=view_pages(matched.pages, spec.rows)))
        longest = T.int32(1)
        for b in range(a.batch_size):
            longest = T.max(longest, (a.page_indptr[b + 1] - a.page_indptr[b]) * spec.page_size)
        most_tasks = num_threads()
        lists = TopKLists(most_tasks * max_tokens, a.positions.shape[1], longest)
        lists.begin()
        tile = TokenTile(rows, a)
        make_sink = T.meta_var(lambda: WeightedScores(rows, ops.lanes, a.weights, lists))
        ops.begin([a.q, *arrays_of(a.pages)])
        with ops.scope(), import_llvm(llvm_helpers(ops.lanes)):
            for b in range(a.batch_size):
                tile.begin_sequence(b)
                for i in range(tile.count):
                    tile.begin(b, i)
                    num_kv_tiles = (tile.end + POSITIONS - 1) // POSITIONS
                    most = T.meta_var(T.min(most_tasks, num_kv_tiles))
                    num_tasks = T.if_then_else(tile.is_large, most, 1)
                    score_tile(rows, a, ops, tile, num_tasks, POSITIONS, make_sink)
                    choose(tile, lists, num_tasks, ops.lanes, a.positions, max_tokens)
        lists.free()

    return index_top_k
