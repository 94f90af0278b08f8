# SPDX-License-Identifier: Apache-2.0
"""Attention with tiles of query rows: the algorithm of prefill.

Tasks take tiles from a queue: some tokens of a sequence with all query heads of one KV head. A task
walks over tiles of positions: K is transposed and V copied into packed tiles once, and all rows
multiply with them, a few blocks at a time through the registers. Tiles that no row may see are
skipped. `split_tiles` is for few tiles over many positions.
"""

from tvm.script import tirx as T

from ...script import inline
from ...signatures.inputs import AttentionInputs, PagedInputs
from ...spec import KernelSpec
from ..isa.matrices.register_tile import ColumnTiles
from ..isa.simd import import_llvm
from ..pages.kv_rows import PagedRows, RaggedRows
from ..rows.products import helpers_of
from ..softmax.logits import AlibiBias
from ..tasks import TASKS, Queue, num_threads
from ..tiles.kv_tile import POSITIONS, KvTile
from ..tiles.output_tile import OutputTile
from ..tiles.query_tile import BLOCKS, QueryTile, Tiling
from ..tiles.row_bounds import RowBounds, TileView
from ..tiles.tile_products import TileProducts
from ..tiles.tile_queue import TileQueue
from ..tiles.tile_softmax import TileSoftmax
from ..tiles.tree_mask import TreeMask
from .single_rows import Singles

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves
TILES_PER_TASK = 8  # with fewer, tiles are halved, so that tasks finish together


@inline
def attend(spec, a, ops, num_positions, single_ops=None):
    """Attend with all rows of a call, whose inputs are as `prefill.described`.

    With `single_ops`, sequences of one row have a queue of their own, and are attended to as in
    decode. Half of the tasks begin with it, so that reading and multiplying go on at the same time.
    """
    has_singles = T.meta_var(single_ops is not None)
    # Multiply-adds, as if all sequences were alike.
    num_rows = T.cast(a.query_indptr[a.batch_size], "int64")
    row_work = T.meta_var(spec.num_qo_heads * spec.qk_head_dim)
    work = num_rows * row_work * num_positions // T.max(a.batch_size, 1)
    num_tasks = T.if_then_else(work > SERIAL_WORK, num_threads(), 1)
    tiling, lanes = T.meta_var((Tiling.of(spec, ops), spec.target.lanes))
    many_rows = T.meta_var(num_tasks * (TILES_PER_TASK * tiling.tokens))
    has_many = num_rows * spec.num_kv_heads >= T.cast(many_rows, "int64")
    max_tokens = T.if_then_else(has_many, tiling.tokens, (tiling.tokens + 1) // 2)
    singles = T.meta_var(Singles(spec, single_ops, a, num_tasks) if has_singles else None)
    if a.tree is not None:
        a.tree.begin()
    queue, singles_queue = Queue(), Queue()
    queue.begin()
    if has_singles:
        singles_queue.begin()
    singles_helpers = T.meta_var(
        (*single_ops.llvm_helpers, *helpers_of(spec)) if has_singles else ()
    )
    helpers = T.meta_var(dict.fromkeys((*ops.llvm_helpers, *singles_helpers)))
    with import_llvm(Queue.llvm_helper, *helpers):
        for task in T.parallel(num_tasks, annotations=TASKS):
            columns = ColumnTiles(ops, spec.target, spec.v_head_dim)
            softmax = TileSoftmax(tiling, ops, lanes)
            bias = T.meta_var(AlibiBias.of(spec, tiling.num_blocks * tiling.rows))
            q = QueryTile(spec, ops, a, columns, bias)
            o = OutputTile(spec, a, q, columns, softmax)
            kv = KvTile(spec, ops, columns)
            products = TileProducts(spec, ops, tiling.rows, columns)
            parts = T.meta_var((q, kv, products, softmax, o))
            mask = T.meta_var(a.mask if a.tree is None else TreeMask(a, a.tree, POSITIONS))
            tiles = TileQueue(spec, a, queue, max_tokens, singles)
            ops.begin_task()
            a.rope.begin_task()
            q.begin_task()
            kv.begin_task()
            if has_singles:
                singles.begin_task(task)
                for turn in range(2):
                    if (task + turn) % 2 == 0:
                        singles.attend(singles_queue, num_tasks)
                    else:
                        attend_tiles(spec, a, mask, tiles, *parts)
            else:
                attend_tiles(spec, a, mask, tiles, *parts)
            ops.end_task()
    if has_singles:
        singles.states.free()


@inline
def attend_tiles(spec, a, mask, tiles, q, kv, products, softmax, o):
    """Attend with the tiles of query rows that a task takes, and store their results."""
    indptr = T.meta_var(a.page_indptr if isinstance(a, PagedInputs) else a.kv_indptr)
    tiles.begin()
    while tiles.has_next():
        first_kv = indptr[tiles.sequence]
        num_kv = indptr[tiles.sequence + 1] - first_kv
        kv.begin_rows(kv_rows(spec, a, first_kv, num_kv, tiles.head))
        kv_len = a.sequences.kv_len(tiles.sequence, num_kv)
        gap = T.meta_var(a.sequences.gap(tiles.sequence))
        k_offset = a.first_positions[tiles.sequence]
        a.rope.begin_sequence(k_offset + kv_len - gap.num_dropped)
        mask.begin_sequence(tiles.sequence, kv_len)
        seen = T.meta_var(mask.of_sequence(k_offset, tiles.first_row))
        q.begin(tiles.first_row + tiles.first_token, tiles.num_tokens, tiles.head)
        o.begin()
        for i in range(gap.num_spans):
            span = T.meta_var(gap.span(i, kv_len, k_offset))
            bounds = T.meta_var(RowBounds(seen, span, tiles, q, kv_len))
            q.begin_span()
            begin = bounds.first()
            end = bounds.last(begin)
            for j in range((end - begin + POSITIONS - 1) // POSITIONS):
                first = begin + j * POSITIONS
                kv.pack_k(first, span.end)
                mask.begin_tile(first, a.rope)
                position = span.k_offset + first
                if a.rope.rotates_k:
                    a.rope.rotate_tile(kv.ops, kv.k.at, POSITIONS, position, mask.offsets)
                kv.pack_v(first, span.end, span.begin)
                kv.find_non_finite(bounds.hides_some(first, 0, q.last_row))
                kv.begin_prefetch(first + POSITIONS, span.end, q.num_blocks)
                for k in range((q.num_blocks + BLOCKS - 1) // BLOCKS):
                    block = k * BLOCKS
                    count = T.min(BLOCKS, q.num_blocks - block)
                    view = T.meta_var(TileView(bounds, first, block, count))
                    if view.sees_some():
                        o.begin_view(view)
                        q.load(view, span.last_position)
                        scores = T.meta_var(products.qk(q, kv, view))  # S = Q K^T
                        if q.bias is not None:
                            scores.add_bias(q.bias, position, mask.offsets)
                        hides_some = view.hides_some()
                        if hides_some:
                            scores.hide()
                        weights = T.meta_var(softmax.update(scores))  # P = exp2(S - maximum)
                        o.finish(view)
                        if hides_some and kv.has_non_finite != 0:
                            products.pv_seen(o, weights, kv)
                        else:
                            products.pv(o, weights, kv)  # O = O * rescale + P V
        o.end()
        tiles.advance()


def kv_rows(spec: KernelSpec, a: AttentionInputs, first, count, head):
    """K and V of a KV head, from the first of `count` pages, or of rows of the arrays."""
    if isinstance(a, PagedInputs):
        table = a.pages, a.page_ids, first, first + count - 1
        return PagedRows(spec, *table, head=head)
    return RaggedRows(a.k, a.v, first, first + count - 1, head=head)
