# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one algorithm.

A block takes a tile of the rows of a sequence for one KV head, as `components.tile_work` tells, and
attends to the columns of the sequence, tile by tile. What a row does not see is hidden from its
scores, see `components.mask`. Where the blocks see parts of the columns only, a second kernel
merges their partial states. `signatures.inputs` describes the arguments; kernels without some of
them are the same source.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...define import attributes
from ...script import inline, prim_func
from ...semantics.rotary_mode import require_own_rotation
from ...semantics.visibility import CausalMask, WholeSequence, WindowMask, lengths_of
from ...signatures.arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from ...signatures.inputs import AttentionInputs, Lengths, PagedInputs, RaggedInputs
from ...spec import LOG2E, KernelSpec
from ..components.block_memory import BlockMemory
from ..components.code_pipeline import kv_pipeline
from ..components.inline_rope import InlineRope
from ..components.kv_rows import RaggedRows, paged_rows, with_page_views
from ..components.logits import Logits
from ..components.mask import TileMask
from ..components.non_finite_v import NonFiniteGuard
from ..components.pipeline import ThreadGroup, commit, copy_rows, wait, zero_padding
from ..components.query_rows import QueryRows
from ..components.softmax import OnlineSoftmax, products_of
from ..components.tile_output import tile_output
from ..components.tile_work import BalancedWork, FixedWork, Segments, Sequences
from ..components.tree import TreeNodes, tree_mask
from ..emit import WARP, as_count, index_temp, launch, sync_block
from ..tiles.fma import MultiplyAdds
from ..tiles.hadamard import hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.mma import TensorCores
from ..tiles.shared_tiles import SharedTiles
from ..tiles.tiling import MAX_ROWS, Tiling
from ..tiles.tiling_choice import suits_first

TREE_ROWS = 64  # of a block: trees have few nodes, and their masks take registers


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the rows of a call attend to.

    Parameters
    ----------
    items : Sequences or Segments
    num_items, num_rows : int32 expressions
        Of the call, or of the step that it is a part of; known to the host.
    make_work : callable
        Tiling -> FixedWork or BalancedWork.
    make_rows : callable
        Rows of K and V that a thread copies -> PagedRows or RaggedRows.
    visible : CausalMask
        The bounds of what a row sees.
    k_offset_of : callable
        Sequence -> RoPE position of its column 0.
    lengths : WholeSequence, optional
        Which positions a sequence has dropped; None: none.
    nodes : TreeNodes, optional
        The trees whose nodes are the last columns.
    row_ids, lse_before : Buffers, optional
        See `QueryRows` and `MergedOutput`.
    """

    items: Sequences | Segments
    num_items: object
    num_rows: object
    make_work: Callable
    make_rows: Callable
    visible: CausalMask
    k_offset_of: Callable
    lengths: WholeSequence | None = None
    nodes: TreeNodes | None = None
    row_ids: object = None
    lse_before: object = None


@inline
def attend(spec: KernelSpec, a: AttentionInputs, batch: Batch, tiling: Tiling):
    """Attend with the tiles of a tiling, and merge the states of tiles that were split."""
    call = T.meta_var(batch.make_work(tiling))
    with call.allocated():
        with launch(call.grid, tiling.num_threads, tiling.min_blocks) as (blocks, thread):
            shared = T.alloc_buffer((tiling.num_bytes,), "uint8", scope="shared.dyn", align=128)
            q = SharedTiles(shared, 0, tiling.q)
            o = SharedTiles(shared, 0, tiling.o)
            work = call.of_block(blocks)
            rows = QueryRows(spec, tiling, work, batch.row_ids)
            threads = T.meta_var(ThreadGroup(rows.thread, tiling.num_threads, sync_block))
            kv_rows = batch.make_rows(tiling.rows_per_thread)
            pipeline = kv_pipeline(
                spec,
                tiling,
                shared,
                max(q.end, o.end),
                replace(threads, thread=thread),
                work.slice,
                kv_rows,
            )
            k, v = pipeline.k, pipeline.v
            scales = T.meta_var(pipeline.scales)
            memory = BlockMemory(shared, pipeline.end_byte, tiling)
            tree = tree_mask(batch.nodes, a, tiling, rows, memory)
            mask = TileMask(batch.visible, batch.lengths, tree, tiling, rows, memory)
            guard = NonFiniteGuard(spec, tiling, rows, memory, batch.lse_before is None)
            rope = InlineRope(spec, a.rotary_mode)
            logits = Logits(spec, rows.count, rows.lane)
            softmax = OnlineSoftmax(tiling.columns, rows.count)
            scores = products_of(tiling.positions, rows.count)
            output = tile_output(batch.lse_before, memory, spec, tiling, a, rows, call, o)
            q_blocks, o_blocks = hadamard_blocks(tiling)

            work.begin(T.truncmod(thread, WARP))
            while work.has_next():
                work.next()
                sequence = T.meta_var(batch.items.number(work.item))
                mask.begin(sequence, batch.k_offset_of(sequence))
                rope.begin(mask.k_offset + work.kv_len - mask.num_dropped)
                kv_rows.begin(batch.items.kv_indptr[sequence], work.head)
                memory.store((mask.k_offset, *work.variables, *mask.gap_fields))
                guard.begin()
                while guard.has_pass():  # a second one only where V is not finite
                    rows.begin(thread)
                    products = (TensorCores if tiling.is_tensor else MultiplyAdds)(
                        tiling, q, rows.warp_row, rows.lane
                    )
                    tree.begin(sequence, mask.k_offset)
                    softmax.reset()
                    if scales is not None:
                        scales.range.reset()
                    guard.begin_pass()
                    zero_padding(q, spec.qk_head_dim, rows.thread, tiling.num_threads)
                    zero_padding(k, spec.qk_head_dim, rows.thread, tiling.num_threads)
                    for i in T.serial(mask.num_spans):
                        memory.load()
                        span = T.meta_var(mask.span(i))
                        mask.begin_span(span)
                        if mask.start < mask.end:
                            set_positions(logits, rows, mask, span, a)
                            mask.keep_bounds(span, thread)
                            load_q(q, tiling, a, rows, mask, span, rope, q_blocks, threads)
                            products.begin()
                            factor = a.sm_scale * T.float32(LOG2E)
                            pipeline.begin(mask.start, mask.end)
                            for tile in T.serial(pipeline.num_tiles):
                                pipeline.wait(tile)
                                first = pipeline.first_position(tile)
                                stage = pipeline.stage(tile)
                                tree.begin_tile(first, rope, logits.has_alibi)
                                guard.begin_tile(pipeline, stage)
                                position = T.meta_var(mask.position_of(span, first))
                                rope.rotate(k, stage, tiling.positions, threads, position)
                                if first < mask.warp_end:
                                    products.scores(scores, k, stage)
                                    if scales is not None:
                                        scales.scale_scores(scores, stage, rows.lane)
                                    logits.scale(scores, factor, position)
                                    guard.mark(logits, scores)
                                    if mask.hides_some(first):
                                        mask.hide(logits, scores, first)
                                    softmax.update(scores)
                                    if scales is not None:
                                        scales.scale_weights(
                                            scores, softmax.output, stage, rows.lane
                                        )
                                    products.accumulate(softmax.output, scores, v, stage)
                            sync_block()  # others may still read the last tile
                    memory.load()
                    softmax.finish()
                    if scales is not None:
                        scales.range.finish(softmax.output)
                        rotate_accumulators(softmax.output, o_blocks, rows.lane)
                    output.prepare(softmax)
                    if guard.is_first_pass():
                        output.store_lse(softmax.lse, thread)
                    guard.end_pass(softmax, output.v_begin)
                    if guard.is_done():
                        output.store_rows(softmax.output, thread)
        call.launch_merge()


@inline
def load_q(q, tiling: Tiling, a: AttentionInputs, rows, mask, span, rope, blocks, threads):
    """Bring the rows of Q into shared memory, rotated if it is asked for."""
    chunk_width = T.meta_var(q.layout.per_chunk)
    copy_rows(
        q,
        tiling.rows,
        a.q.shape[2] // chunk_width,
        threads,
        lambda row, chunk: a.q.ptr_to([*rows.index(row), chunk * chunk_width]),
    )
    commit()
    wait(0)
    sync_block()
    rope.rotate(q, 0, tiling.rows, threads, lambda row: mask.row_position(span, a.q_position, row))
    if len(blocks) > 0:
        rotate_rows(q, 0, tiling.rows, blocks, threads)
        sync_block()


@inline
def set_positions(logits: Logits, rows: QueryRows, mask: TileMask, span, a: AttentionInputs):
    """Tell ALiBi, if there is any, the heads and positions of the thread's rows."""
    if logits.has_alibi:
        for h in T.unroll(rows.count):
            row = T.meta_var(rows.own(h))
            logits.set_row(h, rows.head(row), mask.row_position(span, a.q_position, row))


@inline
def attend_with_one(tilings: Sequence[Tiling], spec: KernelSpec, a: AttentionInputs, batch: Batch):
    """Attend with the first tiling that suits the device and the call."""
    if len(tilings) == 1:
        attend(spec, a, batch, tilings[0])
    else:
        num_rows = T.meta_var(as_count(batch.num_rows) * spec.group_size)
        if suits_first(tilings, num_rows, batch.num_items):
            attend(spec, a, batch, tilings[0])
        else:
            attend_with_one(tilings[1:], spec, a, batch)


# ---- The kernels ---------------------------------------------------------------------------------

_TREE = ("tree_order_indptr", "tree_order")
_ROTATION = ("k_rope_pos_offset", "q_rope_position", "rotary_mode", "rope_scale", "rope_theta")


def visible_columns(a: AttentionInputs) -> CausalMask:
    """Return the mask of rows; among the nodes of trees, the trees know more."""
    if a.mask is not None:
        return a.mask
    if a.tree_order is not None:
        return CausalMask(T.int32(1))
    return CausalMask(a.causal) if a.window is None else WindowMask(a.causal, a.window)


def tree_nodes(a: AttentionInputs) -> TreeNodes | None:
    """Return the trees of a call, if its kernel is for trees."""
    return None if a.tree_order is None else TreeNodes(a.tree_order_indptr, a.tree_order)


def batch_of_pages(spec: KernelSpec, a: PagedInputs) -> Batch:
    """Return what the rows of a kernel over pages attend to."""
    if a.rotary_mode is not None:
        require_own_rotation(spec, a)
    lengths, offsets = lengths_of(spec, a, index_temp), a.k_rope_pos_offset

    def kv_len_of(sequence):
        num_pages = a.page_indptr[sequence + 1] - a.page_indptr[sequence]
        return lengths.kv_len(sequence, index_temp(num_pages))

    items = Sequences(a.q_indptr, a.page_indptr, kv_len_of, a.batch_size)

    def make_work(tiling: Tiling) -> FixedWork | BalancedWork:
        if spec.kind == "mla" and a.tree_order is None:
            return BalancedWork(spec, tiling, a, items, is_continued=False)
        return FixedWork(spec, tiling, a, items, as_count(a.page_values.shape[0]) * spec.page_size)

    return Batch(
        items=items,
        num_items=a.batch_size,
        num_rows=a.q.shape[0],
        make_work=make_work,
        make_rows=lambda count: paged_rows(spec, a.pages, a.page_values, count),
        visible=visible_columns(a),
        k_offset_of=(lambda sequence: T.int32(0)) if offsets is None else offsets.__getitem__,
        lengths=lengths,
        nodes=tree_nodes(a),
    )


def over_pages(
    spec: KernelSpec,
    absent: Sequence[str],
    lengths: Lengths = Lengths.LAST_PAGE,
    max_rows: int = MAX_ROWS,
    mask: type | None = None,
):
    """Build a kernel whose K and V lie in pages; a `mask` is made of the argument `causal`."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)
    tilings = Tiling.choices(spec, spec.kv_dtype, max_rows)

    @prim_func(absent=absent)
    def prefill(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        window: T.int32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries, num_lengths, num_nodes = sizes(6)
        a = T.meta_var(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, *lengths.shape(batch_size, num_lengths)),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                tree_order_indptr=match_int32(tree_order_indptr, batch_size + 1),
                tree_order=match_int32(tree_order, num_nodes, 2),
                window=window,
                length_form=lengths,
                mask=None if mask is None else mask(causal),
            )
        )
        views = T.meta_var(with_page_views(spec, a))
        attend_with_one(tilings, spec, views, batch_of_pages(spec, views))

    return prefill


def batch_of_ragged(spec: KernelSpec, a: RaggedInputs) -> Batch:
    """Return what the rows of a kernel over ragged arrays attend to."""
    require_own_rotation(spec, a)
    nodes = tree_nodes(a)

    def kv_len_of(sequence):
        return a.kv_indptr[sequence + 1] - a.kv_indptr[sequence]

    def k_offset_of(sequence):
        if a.k_rope_pos_offset is not None:
            return a.k_rope_pos_offset[sequence]
        return nodes.first_of_ragged(sequence, a.q_indptr, a.kv_indptr, a.q_rope_position)

    items = Sequences(a.q_indptr, a.kv_indptr, kv_len_of, a.batch_size)
    return Batch(
        items=items,
        num_items=a.batch_size,
        num_rows=a.q.shape[0],
        make_work=lambda tiling: FixedWork(spec, tiling, a, items, a.k.shape[0]),
        make_rows=lambda count: RaggedRows(a.k, a.v),
        visible=visible_columns(a),
        k_offset_of=k_offset_of,
        nodes=nodes,
    )


def over_ragged(spec: KernelSpec, absent: Sequence[str], max_rows: int = MAX_ROWS):
    """Build a kernel whose K and V are ragged arrays."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows = row_matcher(spec)
    tiling = Tiling.of(spec, spec.dtype, max_rows)

    @prim_func(absent=absent)
    def prefill_ragged(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        k_rope_pos_offset: T.handle,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        window: T.int32,
    ):
        T.func_attr(attributes(spec))
        num_starts, num_rows, num_columns, num_nodes = sizes(4)
        a = T.meta_var(
            RaggedInputs(
                batch_size=num_starts - 1,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, num_starts),
                k=match_rows(k, num_columns, spec.num_kv_heads, qk_dim),
                v=match_rows(v, num_columns, spec.num_kv_heads, v_dim),
                kv_indptr=match_int32(kv_indptr, num_starts),
                q_rope_position=match_int32(q_rope_position, num_rows),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, num_starts - 1),
                tree_order_indptr=match_int32(tree_order_indptr, num_starts),
                tree_order=match_int32(tree_order, num_nodes, 2),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )
        attend(spec, a, batch_of_ragged(spec, a), tiling)

    return prefill_ragged


def prefill(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS, mask: type = CausalMask):
    """Attention of several query rows per sequence over its pages.

    `mask` is a class of masks, made of the argument `causal`.
    """
    return over_pages(spec, (*_TREE, "window"), lengths, mask=mask)


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``length_info [3, B]``, as the stock cache passes it for windows."""
    return prefill(spec, Lengths.MATRIX)


def prefill_sliding(spec: KernelSpec):
    """`prefill` of layers with a window: a row sees its position and the `window` - 1 before it.

    `window` is at least 1. The rows of a sequence are the last positions of its pages, or follow
    them where `causal` is 0.
    """
    return over_pages(spec, _TREE)


def prefill_ragged(spec: KernelSpec):
    """Attention of several query rows per sequence over ragged K and V."""
    return over_ragged(spec, (*_TREE, "window"))


def prefill_ragged_sliding(spec: KernelSpec):
    """`prefill_ragged` of layers with a window of at least 1, as in `prefill_sliding`."""
    return over_ragged(spec, _TREE)


def tree_paged(spec: KernelSpec):
    """Attention of new tree nodes over pages that hold this step's K and V already.

    The rows of a sequence are the last nodes of its uncommitted tree, and the tree's n nodes, of
    this and earlier steps, are its last n columns. A row sees all columns before the tree, its
    ancestors and itself. A sequence with n = 0 is plain causal, as is one whose nodes form a chain.
    Nodes follow their parents; trees may have any size. A call in which a sequence has fewer nodes
    than rows, but some, is refused on CPUs; on GPUs its results are meaningless.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; q_rope_position should say the same of the rows.
    """
    return over_pages(spec, ("causal", "window"), max_rows=TREE_ROWS)


def tree_paged_sliding(spec: KernelSpec):
    """`tree_paged` of layers with a window.

    `window` is at least 1. A row sees of these columns those whose position is less than `window`
    before its own, itself included. Positions are those of RoPE, whatever the rotary_mode:
    q_rope_position of the rows; k_rope_pos_offset plus the column before the tree; and of a node
    its depth more than there are columns before the tree.
    """
    return over_pages(spec, ("causal",), max_rows=TREE_ROWS)


def tree(spec: KernelSpec):
    """Attention among tree nodes whose K and V are ragged arrays.

    As `tree_paged`, with all columns of a sequence in k and v; usually these are the step's own
    rows. They may be fewer than the tree has nodes: then they are the last ones, and a row sees its
    ancestors among them. K of a column is rotated by the position that q_rope_position gives the
    first row, plus the difference of their depths.
    """
    return over_ragged(spec, ("k_rope_pos_offset", "causal", "window"), TREE_ROWS)


def tree_sliding(spec: KernelSpec):
    """`tree` of layers with a window of at least 1, as in `tree_paged_sliding`."""
    return over_ragged(spec, ("k_rope_pos_offset", "causal"), TREE_ROWS)


def mla_prefill(spec: KernelSpec):
    """Absorbed attention of any number of rows per sequence over the latent rows in its pages.

    A latent row is K, and its first columns are V, so a tile of it is copied once and multiplied
    twice. All query heads are rows of a tile.
    """
    return over_pages(spec, (*_ROTATION, *_TREE, "window"))


def mla_tree(spec: KernelSpec):
    """Absorbed attention of new tree nodes; rows see what they see in `tree_paged`."""
    return over_pages(spec, (*_ROTATION, "causal", "window"), max_rows=TREE_ROWS)
