# SPDX-License-Identifier: Apache-2.0
"""Attention of tiles of query rows: the algorithm of prefill, token trees, MLA and shared prefixes.

A block takes a tile of the rows of a sequence for one KV head, as `work.tile_work` tells, and
attends to the columns of the sequence, tile by tile. What a row does not see is hidden from its
scores, see `scores.mask`. Where the blocks see parts of the columns only, a second kernel
merges their partial states.

Events of a block with s stages, for each of its tiles of rows::

    begin_rows             find the rows and columns; spill their indices to shared memory
    attend_to_columns      for each span of columns, of which dropped positions leave two:
        load                   copy Q, barrier, rotate it
        compute                start to copy the first s - 1 tiles of K and V; for each tile t:
                                   wait for tile t, barrier
                                   start to copy tile t + s - 1, where tile t - 1 was
                                   S = Q K^T, mask, P = softmax(S), O += P V: own rows of a warp
                               barrier
    finish_rows            O to global memory, through shared memory where Q was, or as a state
                           of a split; all again with care if V is not finite
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import CausalMask, RaggedSequence, WholeSequence
from ...signatures.inputs import AttentionInputs
from ...spec import LOG2E, KernelSpec
from ..isa import isa_of
from ..registers import WARP, as_count
from ..scores.block_memory import BlockMemory
from ..scores.mask import TileMask
from ..scores.non_finite_v import NonFiniteGuard
from ..scores.query_rows import QueryRows
from ..scores.softmax import Logits, OnlineSoftmax, products_of
from ..scores.tree import NoTree, TreeMask
from ..tiles.code_pipeline import kv_pipeline
from ..tiles.pipeline import ThreadGroup, copy_rows, zero_padding
from ..tiles.rotations import InlineRope, hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.shared_tiles import SharedTiles
from ..tiles.tiling import Tiling
from ..tiles.tiling_choice import suits_first
from ..work.partial_states import sink_of
from ..work.tile_output import tile_output
from ..work.work_items import Items


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of a call, and the columns that they attend to.

    Parameters
    ----------
    items : Items
    num_items, num_rows : int32 expressions
        Of the call, or of the step that it is a part of; known to the host.
    make_work : callable
        Tiling -> FixedWork or BalancedWork.
    make_rows : callable
        Rows of K and V that a thread copies -> PagedRows or RaggedRows.
    visible : CausalMask
        The bounds of what a row sees.
    sequences : WholeSequence
        Which positions a sequence has dropped; the default is none.
    lse_before : Buffer, optional
        The logs of what rows have seen before, to be merged with; see `MergedOutput`.
    """

    items: Items
    num_items: object
    num_rows: object
    make_work: Callable
    make_rows: Callable
    visible: CausalMask
    sequences: WholeSequence = RaggedSequence()
    lse_before: object = None


@inline
def attend(spec: KernelSpec, a: AttentionInputs, batch: Batch, tiling: Tiling):
    """Attend with the tiles of a tiling, and merge the states of tiles that were split."""
    isa = T.meta_var(isa_of(spec.target))
    call = T.meta_var(batch.make_work(tiling))
    with call.allocated():
        size = T.meta_var((tiling.num_threads, tiling.min_blocks))
        with isa.launch(call.grid, *size, waits=False) as (blocks, thread):
            attend_to_tiles(spec, a, batch, tiling, call, blocks, thread)
        call.launch_merge()


@inline
def attend_to_tiles(spec, a, batch: Batch, tiling: Tiling, call, blocks, thread):
    """Attend with the rows of a block's tiles, one after the other.

    Parameters
    ----------
    spec, a, batch, tiling : see `attend`
    call : FixedWork or BalancedWork
    blocks, thread : what `Isa.launch` yields
    """
    # ---- Setup -----------------------------------------------------------------------------------
    isa = T.meta_var(isa_of(spec.target))
    shared = isa.shared_memory(tiling.num_bytes, 1024)
    q_tile = SharedTiles(shared, 0, tiling.q)
    o_tile = SharedTiles(shared, 0, tiling.o)
    work = call.of_block(blocks)
    rows = QueryRows(spec, tiling, work)
    sync = T.meta_var(isa.tile_barrier(tiling))
    threads = T.meta_var(ThreadGroup(rows.thread, tiling.num_threads, sync))
    producers = T.meta_var(replace(threads, thread=thread))
    kv_rows = batch.make_rows(tiling.rows_per_thread)
    kv_begin = T.meta_var(max(q_tile.end, o_tile.end))
    pipeline = kv_pipeline(spec, tiling, shared, kv_begin, producers, work.slice, kv_rows)
    k, scales = pipeline.k, pipeline.scales
    memory = BlockMemory(shared, pipeline.end_byte, tiling)
    tree = NoTree() if a.tree_order is None else TreeMask(a, tiling, rows, memory)
    mask = TileMask(batch.visible, batch.sequences, a, tree, tiling, rows, memory)
    guard = NonFiniteGuard(spec, tiling, rows, memory, batch.lse_before is None, sync)
    rope = InlineRope(spec, a.rotary_mode)
    logits = Logits(spec, rows.count, rows.lane, leaves_scale=tiling.by_warpgroups)
    softmax = OnlineSoftmax(isa, rows.count)
    o = products_of(tiling.columns, rows.count)
    scores = products_of(tiling.positions, rows.count)
    output = tile_output(batch.lse_before, memory, spec, tiling, a, rows, call, o_tile)
    q_blocks, o_blocks = T.meta_var(hadamard_blocks(tiling))
    factor = T.meta_var(a.sm_scale * T.float32(LOG2E))
    left_factor = T.meta_var(logits.left_of(factor))

    @inline
    def begin_rows():
        """Find the next tile of rows, and the columns of their sequence."""
        work.advance()
        sequence = T.meta_var(batch.items.offset + work.item)
        tree.begin_sequence(sequence)
        mask.begin(sequence)
        rope.begin(mask.k_offset + work.kv_len - mask.gap.num_dropped)
        kv_rows.begin(batch.items.kv_indptr[sequence], work.head)
        which = T.meta_var((mask.k_offset, *work.variables, *mask.gap.fields, *kv_rows.variables))
        memory.spill(which, thread)
        guard.begin()

    @inline
    def load(span):
        """Load Q, rotated, and start to copy the first tiles of K and V of a span."""
        set_positions(logits, rows, mask, span, a)
        mask.keep_bounds(span, thread)
        load_q(q_tile, tiling, a, rows, mask, span, rope, q_blocks, threads)

    @inline
    def compute(products, v, span):
        """Attend to the tiles of a span."""
        products.begin()
        pipeline.begin(mask.start, mask.end)
        for tile in T.serial(pipeline.num_tiles):
            pipeline.wait(tile)
            first = pipeline.first_position(tile)
            stage = pipeline.stage(tile)
            tree.begin_tile(first, rope, logits.has_alibi)
            guard.begin_tile(pipeline, stage)
            position = T.meta_var(mask.position_of(span, first))
            rope.rotate(k, stage, tiling.positions, threads, position)
            if first < mask.joint_end:
                products.qk(scores, k, stage)  # S = Q K^T
                scales.scale_scores(scores, stage, rows.lane)
                logits.scale(scores, factor, position)
                guard.mark(logits, scores)
                if mask.hides_some(first):
                    mask.hide(logits, scores, first)
                weights = T.meta_var(softmax.update(scores, o, left_factor))  # P, where S was
                scales.scale_weights(weights, o, stage, rows.lane)
                products.pv(o, weights, v, stage)  # O += P V
        isa.sync_block()  # others may still read the last tile

    @inline
    def attend_to_columns():
        """Attend to all columns that the rows see: one span of them, or two."""
        rows.begin(thread)
        v = pipeline.v.from_chunk(T.truncdiv(rows.v_begin, pipeline.v.layout.per_chunk))
        products = isa.tile_products(tiling, q_tile, k, v, rows)
        tree.begin(mask.k_offset)
        softmax.reset(o)
        scales.reset()
        guard.begin_pass()
        zero_padding(q_tile, spec.qk_head_dim, rows.thread, tiling.num_threads)
        zero_padding(k, spec.qk_head_dim, rows.thread, tiling.num_threads)
        i = 0
        while i < mask.gap.num_spans:
            span = T.meta_var(mask.begin_span(i))
            if mask.start < mask.end:
                load(span)
                compute(products, v, span)
            mask.end_span()
            i += 1

    @inline
    def finish_rows():
        """Divide the sums, and store O and its logs, or a partial state."""
        sink = T.meta_var(lambda h: sink_of(a, rows.index(rows.own(h)), work.is_whole))
        softmax.finish(o, sink, left_factor)
        scales.finish(o)
        rotate_accumulators(isa, o, o_blocks, rows.lane)
        output.prepare(o, softmax.lse)
        if guard.is_first_pass():
            output.store_lse(softmax.lse, thread)
        guard.end_pass(o, softmax.lse, output.v_begin)
        if guard.is_done():
            output.store_rows(o, thread)

    # ---- The loop, as drawn above ----------------------------------------------------------------
    work.take_split(T.truncmod(thread, WARP))
    isa.wait_for_kernels_before()
    while work.has_next():
        begin_rows()
        while guard.has_pass():  # a second one only where V is not finite
            attend_to_columns()
            finish_rows()


@inline
def load_q(q, tiling: Tiling, a: AttentionInputs, rows, mask, span, rope, blocks, threads):
    """Bring the rows of Q into shared memory, rotated if it is asked for."""
    chunk_width = T.meta_var(q.layout.per_chunk)
    copy_rows(
        q,
        tiling.rows,
        a.q.shape[2] // chunk_width,
        threads,
        lambda row, chunk: (a.q, (*rows.index(row), chunk * chunk_width)),
    )
    q.isa.commit_copies()
    q.isa.wait_for_copies(0)
    threads.sync()
    rope.rotate(q, 0, tiling.rows, threads, lambda row: mask.row_position(span, a.q_position, row))
    if len(blocks) > 0:
        rotate_rows(q, 0, tiling.rows, blocks, threads)
        q.isa.sync_block()


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
        if suits_first(isa_of(spec.target), tilings, num_rows, batch.num_items):
            attend(spec, a, batch, tilings[0])
        else:
            attend_with_one(tilings[1:], spec, a, batch)
