# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays.

Tasks take tiles from a queue: some tokens of a sequence with all query heads of one KV head. A task
walks over tiles of positions: K is transposed and V copied into packed tiles once, and all rows
multiply with them, a few at a time through the registers. Tiles that no row may see are skipped.
`signatures.inputs` has the arguments.
"""

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import arrays_of, view_pages
from ...script import inline, prim_func
from ...semantics.visibility import CausalMask, mask_of, sequences_of
from ...signatures.attention import (
    PREFILL,
    PREFILL_RAGGED,
    PREFILL_RAGGED_SLIDING,
    PREFILL_SLIDING,
    PREFILL_SPANS,
    PREFILL_SPANS_SLIDING,
    PREFILL_WINDOWED,
)
from ...signatures.inputs import AttentionInputs, Elements, PagedInputs, RaggedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..isa.matrices.register_tile import ColumnTiles
from ..isa.simd import import_llvm, index_temp, require_half_conversion
from ..pages.kv_rows import PagedRows, RaggedRows
from ..rotation import rotation_of
from ..rows.products import helpers_of, single_row_operands
from ..softmax.logits import AlibiBias
from ..softmax.online_softmax import OnlineSoftmax
from ..tiles.kv_operands import operands
from ..tiles.packed_kv import POSITIONS, PackedKv
from ..tiles.query_tile import BLOCKS, QueryTile, Tiling
from ..tiles.row_bounds import RowBounds, TilePart
from ..tiles.score_tile import ScoreTile
from ..tiles.tile_queue import TileQueue
from ..tiles.tree_mask import TokenTrees, TreeMask
from ..work import TASKS, Queue, num_threads
from .single_rows import Singles

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves
TILES_PER_TASK = 8  # with fewer, tiles are halved, so that tasks finish together


@inline
def attend(spec, a, ops, num_positions, single_ops=None):
    """Attend with all rows of a call, whose inputs are as `described`.

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
            softmax = OnlineSoftmax(tiling.num_blocks, tiling.rows, lanes)
            bias = T.meta_var(AlibiBias.of(spec, tiling.num_blocks * tiling.rows))
            rows = QueryTile(spec, ops, a, columns, softmax, bias)
            kv = PackedKv(spec, ops, columns)
            scores = ScoreTile(spec, ops, rows, columns)
            mask = T.meta_var(a.mask if a.tree is None else TreeMask(a, a.tree, POSITIONS))
            tiles = TileQueue(spec, a, queue, max_tokens, singles)
            ops.begin_task()
            a.rope.begin_task()
            rows.begin_task()
            kv.begin_task()
            if has_singles:
                singles.begin_task(task)
                for turn in range(2):
                    if (task + turn) % 2 == 0:
                        singles.attend(singles_queue, num_tasks)
                    else:
                        attend_tiles(spec, a, mask, tiles, rows, kv, scores)
            else:
                attend_tiles(spec, a, mask, tiles, rows, kv, scores)
            ops.end_task()
    if has_singles:
        singles.states.free()


@inline
def attend_tiles(spec, a, mask, tiles, rows, kv, scores):
    """Attend with the tiles of query rows that a task takes, and store their results."""
    indptr = T.meta_var(a.page_indptr if isinstance(a, PagedInputs) else a.kv_indptr)
    tiles.begin()
    while tiles.has_next():
        first_kv = indptr[tiles.sequence]
        num_kv = indptr[tiles.sequence + 1] - first_kv
        source = T.meta_var(kv_rows(spec, a, first_kv, num_kv, tiles.head))
        kv_len = a.sequences.kv_len(tiles.sequence, num_kv)
        gap = T.meta_var(a.sequences.gap(tiles.sequence))
        k_offset = a.first_positions[tiles.sequence]
        a.rope.begin_sequence(k_offset + kv_len - gap.num_dropped)
        mask.begin_sequence(tiles.sequence, kv_len)
        seen = T.meta_var(mask.of_sequence(k_offset, tiles.first_row))
        rows.begin(tiles.first_row + tiles.first_token, tiles.num_tokens, tiles.head)
        for i in range(gap.num_spans):
            span = T.meta_var(gap.span(i, kv_len, k_offset))
            bounds = T.meta_var(RowBounds(seen, span, tiles, rows, kv_len))
            rows.begin_span()
            begin = bounds.first()
            end = bounds.last(begin)
            for j in range((end - begin + POSITIONS - 1) // POSITIONS):
                first = begin + j * POSITIONS
                kv.pack_k(source, first, span.end)
                mask.begin_tile(first, a.rope)
                position = span.k_offset + first
                if a.rope.rotates_k:
                    a.rope.rotate_tile(kv.ops, kv.k.at, POSITIONS, position, mask.offsets)
                kv.pack_v(source, first, span.end, span.begin)
                kv.find_non_finite(bounds.hides_some(first, 0, rows.last_row))
                kv.begin_prefetch(first + POSITIONS, span.end, rows.num_blocks)
                for k in range((rows.num_blocks + BLOCKS - 1) // BLOCKS):
                    block = k * BLOCKS
                    count = T.min(BLOCKS, rows.num_blocks - block)
                    part = T.meta_var(TilePart(bounds, first, block, count))
                    if part.sees_some():
                        rows.pack(part, span.last_position)
                        scores.multiply(kv, source, part)
                        if rows.bias is not None:
                            scores.add_bias(rows.bias, part, position, mask.offsets)
                        hides_some = part.hides_some()
                        if hides_some:
                            scores.hide(part)
                        scores.weigh(part)
                        rows.finish(part)
                        if hides_some and kv.has_non_finite != 0:
                            rows.add_visible(scores, kv, part)
                        else:
                            rows.add(scores, kv, part)
        rows.end()
        tiles.advance()


def kv_rows(spec: KernelSpec, a: AttentionInputs, first, count, head):
    """K and V of a KV head, from the first of `count` pages, or of rows of the arrays."""
    if isinstance(a, PagedInputs):
        table = a.pages, a.page_ids, first, first + count - 1
        return PagedRows(spec, *table, head=head)
    return RaggedRows(a.k, a.v, first, first + count - 1, head=head)


def described(
    spec: KernelSpec, a: AttentionInputs, prepare: Callable = lambda a: a
) -> AttentionInputs:
    """The inputs with sequences, rotation, and mask or trees, after what `prepare` emits."""
    if isinstance(a, PagedInputs):
        a = prepare(replace(a, pages=view_pages(a.pages, spec)))
    a = replace(a, sequences=sequences_of(spec, a, index_temp), rope=a.rope or rotation_of(spec, a))
    if a.tree_order is not None:
        trees = TokenTrees(spec, a)
        if isinstance(a, RaggedInputs):
            a = replace(a, first_positions=Elements(trees.first_position))
        return replace(a, tree=trees)
    if a.mask is not None:
        return a
    return replace(a, mask=mask_of(a))


def paged(
    spec: KernelSpec,
    signature: Signature,
    *,
    has_singles: bool = True,
    prepare: Callable[[PagedInputs], PagedInputs] = lambda a: a,
):
    """Build a kernel over pages.

    Parameters
    ----------
    spec : KernelSpec
    signature : Signature
    has_singles : bool
        Whether sequences of one row are attended to as in decode.
    prepare : callable
        Emits what comes before, and returns the inputs as `described` takes them.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    ops = operands(spec, spec.kv_dtype)
    single_ops = single_row_operands(spec, ops) if has_singles else None

    @prim_func(arguments=signature.of(spec))
    def prefill(a: PagedInputs):
        T.func_attr(attributes(spec))
        ready = T.meta_var(described(spec, a, prepare))
        num_positions = T.meta_var(
            T.cast(ready.page_indptr[a.batch_size], "int64") * spec.page_size
        )
        arrays = T.meta_var((ready.q, *arrays_of(ready.pages)))
        pairs = T.meta_var([b for b in arrays if str(b.dtype) == "bfloat16"])
        ops.begin(pairs)
        if single_ops is not None and single_ops is not ops:
            single_ops.begin(pairs)
        attend(spec, ready, ops, num_positions, single_ops)

    return prefill


def ragged(spec: KernelSpec, signature: Signature):
    """Build a kernel over ragged K and V."""
    require_half_conversion(spec, spec.dtype)
    ops = operands(spec, spec.dtype)

    @prim_func(arguments=signature.of(spec))
    def prefill_ragged(a: RaggedInputs):
        T.func_attr(attributes(spec))
        ready = T.meta_var(described(spec, a))
        num_positions = T.meta_var(T.cast(ready.kv_indptr[ready.batch_size], "int64"))
        ops.begin([b for b in (ready.q, ready.k, ready.v) if str(b.dtype) == "bfloat16"])
        attend(spec, ready, ops, num_positions)

    return prefill_ragged


def prefill(spec: KernelSpec, signature: Signature = PREFILL, mask: type = CausalMask):
    """Build `prefill`: causal, or not, for sequences that may have dropped positions.

    `mask` is a class of masks, made of the argument `causal`.
    """
    return paged(
        spec,
        signature,
        has_singles=mask.sees is None,
        prepare=lambda a: replace(a, mask=mask(a.causal)),
    )


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``lengths [3, B]``, as the stock cache passes it for windows.

    A sequence holds the slots before the third and from the second number on, as
    `visibility.GappedSequence` describes. All rows of a step see what the first one does.
    """
    return prefill(spec, PREFILL_WINDOWED)


def prefill_sliding(spec: KernelSpec):
    """Build `prefill` of layers with a window: a row sees the last `window` positions.

    Its own position is one of them; with a negative `window` a row sees its chunk of ``-window``
    positions, up to its own. The rows of a sequence are the last
    positions of its pages, or follow them where `causal` is 0. The page table of a sequence may
    begin anywhere in it: columns are counted from the first slot of the table, which is position
    ``first_positions[b]`` of the sequence.
    """
    return paged(spec, PREFILL_SLIDING)


def prefill_spans(spec: KernelSpec):
    """Build `prefill` of steps with spans that are attended to in both directions: `row_reach`."""
    return paged(spec, PREFILL_SPANS)


def prefill_spans_sliding(spec: KernelSpec):
    """Build `prefill_spans` of layers with a window, as in `prefill_sliding`."""
    return paged(spec, PREFILL_SPANS_SLIDING)


def prefill_ragged(spec: KernelSpec):
    """Build `prefill` over ragged K and V."""
    return ragged(spec, PREFILL_RAGGED)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build `prefill_ragged` of layers with a window, as in `prefill_sliding`."""
    return ragged(spec, PREFILL_RAGGED_SLIDING)
