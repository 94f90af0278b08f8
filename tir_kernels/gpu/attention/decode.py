# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The work is bound by reading K and V once, so it is split by pages: as many blocks as the GPU holds
take equal splits of the pages of all sequences and KV heads, whatever their lengths are. A block
finds its split from the page table's starts, so every batch of a shape is launched alike. A pair of
a sequence and a KV head that falls into one split is finished there; one that is cut leaves partial
states, which a second kernel merges.

The warps of a block form groups. Each group takes every few tiles of positions, runs a softmax of
its own and waits for no other; the states of the groups are merged in the end.
"""

from tvm.script import tirx as T

from ...define import attributes
from ...script import inline, prim_func
from ...semantics.rope import has_rope, require_own_rotation
from ...semantics.visibility import sequences_of
from ...signatures.attention import DECODE, DECODE_SLIDING, DECODE_WINDOWED
from ...signatures.inputs import PagedInputs
from ...signatures.signature import Signature
from ...spec import LOG2E, KernelSpec
from ..isa import isa_of
from ..registers import WARP, Registers, index_temp
from ..scores.logits import Logits
from ..scores.softmax import ROW_LANES, OnlineSoftmax, products_of
from ..scores.visible_columns import VisibleColumns
from ..tiles.code_pipeline import kv_pipeline
from ..tiles.decode_tiling import DecodeTiling
from ..tiles.hadamard import hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.inline_rope import InlineRope
from ..tiles.kv_rows import as_int64, paged_rows, with_page_views
from ..tiles.pipeline import ThreadGroup, copy_rows, zero_padding
from ..tiles.shared_tiles import SharedTiles
from ..work.group_states import GroupStates
from ..work.page_schedule import PageSchedule
from ..work.partial_states import MERGE_BLOCK_SIZE, MERGED_ROWS, RUN, BlockStates, sink_of

MAX_PACKED_COLUMNS = 128  # of V with codes of 4 bits: 256 spilled 148 bytes


def decode(spec: KernelSpec, signature: Signature = DECODE):
    """Build `decode`, or another kernel of its kind that `signature` belongs to.

    With a `window` a row sees the last positions of its pages, or those of its chunk. The cost
    scales with the window, but work is balanced among blocks only if the page table has few pages
    before it.
    """
    isa, group_size, v_dim = isa_of(spec.target), spec.group_size, spec.v_head_dim
    (*roomy, tiling), code_tiling = DecodeTiling.choices(spec), code_tiling_of(spec)

    @prim_func(arguments=signature.of(spec))
    def decode(arguments: PagedInputs):
        T.func_attr(attributes(spec))
        require_own_rotation(spec, arguments)
        a = T.meta_var(with_page_views(spec, arguments))
        sequences = T.meta_var(sequences_of(spec, a, index_temp))

        @inline
        def attend_to_split(tiling, mode, states, work, block, slice_id, thread):
            """Attend to the block's split of the pages, pair by pair."""
            lane = T.truncmod(thread, WARP)
            group = T.truncdiv(thread, tiling.num_group_threads)
            group_thread = T.truncmod(thread, tiling.num_group_threads)
            warp_row = T.truncdiv(group_thread, WARP) * tiling.warp_rows
            first_row = T.truncdiv(slice_id, tiling.slices) * tiling.rows
            v_slice = T.truncmod(slice_id, tiling.slices)
            threads = T.meta_var(ThreadGroup(thread, tiling.num_threads, isa.sync_block))
            warps = T.meta_var(warps_of(isa, tiling, group_thread, group))
            shared = isa.shared_memory(tiling.num_bytes)
            q_tile = T.meta_var(SharedTiles(shared, 0, tiling.q))
            rows = paged_rows(spec, a.pages, a.page_ids, tiling.rows_per_thread)
            pipeline = kv_pipeline(spec, tiling, shared, q_tile.end, warps, v_slice, rows)
            k, v = T.meta_var((pipeline.k, pipeline.v))
            products = isa.decode_products(tiling, q_tile, pipeline, warp_row, lane)
            scales = products.scales
            scores = products_of(tiling.positions, tiling.rows_of_thread)
            logits = Logits(spec, tiling.rows_of_thread, lane)
            softmax = OnlineSoftmax(isa, tiling.columns, tiling.rows_of_thread)
            rope = InlineRope(spec, mode)
            columns = VisibleColumns(a, sequences)
            groups = GroupStates(tiling, shared)
            num_runs = T.meta_var(tiling.rows * tiling.columns // RUN)
            factor = a.sm_scale * T.float32(LOG2E)

            groups.has_rows = 0
            work.take_split(block, lane)
            isa.wait_for_kernels_before()
            while work.has_next() or groups.has_rows != 0:
                has_pair = T.cast(work.has_next(), "int32")
                if has_pair != 0:
                    work.advance()
                    rows.begin(work.first_entry, work.head)
                    columns.begin(work.sequence, work.num_pages)
                    rope.begin(columns.length)
                    columns.take(0, work)
                    if tiling.copies_beside_states:  # while the pair before is stored
                        start(tiling, q_tile, pipeline, threads, work, columns, first_row)
                if groups.has_rows != 0:
                    groups.has_rows = 0
                    isa.sync_block()  # all states are there
                    for turn in T.serial(T.ceildiv(num_runs, tiling.num_threads)):
                        run = turn * tiling.num_threads + thread
                        row = T.truncdiv(run, tiling.columns // RUN)
                        column = T.truncmod(run, tiling.columns // RUN) * RUN
                        head = first_row + row
                        v_column = v_slice * tiling.columns + column
                        if row < tiling.rows and head < group_size and v_column < v_dim:
                            o_row = T.meta_var((groups.sequence, groups.head * group_size + head))
                            sink = T.meta_var(sink_of(a, o_row, groups.is_whole != 0))
                            groups.merge(row, column, sink)
                            if groups.is_whole != 0:
                                isa.store_floats(a.o, (*o_row, v_column), Registers.of(groups.o))
                                if v_column == 0:
                                    a.lse[o_row] = groups.lse
                            else:
                                state = T.meta_var((groups.slot, head))
                                states.put(state, v_column, Registers.of(groups.o))
                                if v_column == 0:
                                    states.put_lse(state, groups.lse)
                if has_pair != 0:
                    softmax.reset()
                    scales.reset()
                    for span in T.serial(columns.gap.num_spans):
                        if span > 0 or not tiling.copies_beside_states:
                            isa.sync_block()  # none reads any more what lies there
                            columns.take(span, work)
                            start(tiling, q_tile, pipeline, threads, work, columns, first_row)
                        if columns.first < columns.end:
                            isa.wait_for_copies(pipeline.ahead)
                            isa.sync_block()
                            prepare_q(tiling, q_tile, threads, rope, products, columns.q_position)
                            products.begin()
                            set_rows(spec, logits, work, first_row + warp_row, columns.q_position)
                            for tile in T.serial(pipeline.num_tiles):
                                pipeline.wait(tile)
                                first = pipeline.first_position(tile)
                                stage = pipeline.stage(tile)
                                offset = columns.k_offset + first
                                k_position = T.meta_var(lambda column: offset + column)
                                rope.rotate(k, stage, tiling.positions, warps, k_position)
                                scales.begin_tile(first)
                                products.scores(scores, k, stage)
                                scales.scale_scores(scores, stage, lane)
                                logits.scale(scores, factor, k_position)
                                if first + tiling.positions > columns.end:
                                    is_seen = T.meta_var(lambda h, i: first + i < columns.end)
                                    logits.hide(scores, is_seen)
                                softmax.update(scores)
                                scales.scale_weights(scores, softmax.output, stage, lane)
                                products.accumulate(softmax.output, scores, v, stage)
                    softmax.finish()
                    scales.finish(softmax.output)
                    rotate_accumulators(isa, softmax.output, hadamard_blocks(tiling)[1], lane)
                    isa.sync_block()  # none reads K and V any more
                    groups.put(group, warp_row, softmax, products)
                    groups.name(work, states.slot(block, work.first > 0))

        @inline
        def start(tiling, q_tile, pipeline, threads, work, columns, first_row):
            """Start to copy Q, and the first tiles of K and V of a range of columns."""
            if columns.first < columns.end:
                zero_padding(q_tile, spec.qk_head_dim, threads.thread, threads.num_threads)
                zero_padding(pipeline.k, spec.qk_head_dim, threads.thread, threads.num_threads)
                if spec.qk_head_dim % pipeline.k.layout.per_chunk:  # the chunk holds codes as well
                    threads.sync()
                load_q(spec, tiling, q_tile, threads, a.q, work, first_row)
                pipeline.begin(columns.first, columns.end)

        @inline
        def merge_states(states, work, block, rows, thread):
            """Merge the pair that begins in the block's split and ends in a later one."""
            lane = T.truncmod(thread, WARP)
            row = rows * MERGED_ROWS + T.truncdiv(thread, WARP)
            work.find_cut(block, lane)
            isa.wait_for_kernels_before()
            if row < group_size:
                if work.begins_in_split():
                    index_of = T.meta_var(lambda i: (states.slot(block + i, i > 0), row))
                    output = T.meta_var((work.sequence, work.head * group_size + row))
                    states.merge(a, index_of, work.num_splits(block), output, lane)
                for turn in T.serial(T.ceildiv(a.batch_size - block, states.num_blocks)):
                    sequence = turn * states.num_blocks + block
                    if a.page_indptr[sequence + 1] == a.page_indptr[sequence]:
                        for kv_head in T.serial(spec.num_kv_heads):
                            states.clear(a, (sequence, kv_head * group_size + row), lane)

        @inline
        def attend(tiling, mode):
            num_slices = T.meta_var(tiling.row_slices * tiling.slices)
            blocks = T.meta_var(
                isa.resident_blocks(tiling.num_bytes, tiling.min_blocks, num_slices)
            )
            states = BlockStates(spec, blocks)
            split = T.meta_var((spec, a.page_indptr, a.batch_size, blocks, tiling.block_positions))
            with states.allocated():
                grid, size = T.meta_var([blocks, num_slices]), T.meta_var(tiling.block_size)
                with isa.launch(grid, *size, waits=False) as ((block, slice_id), thread):
                    work = PageSchedule(*split)
                    attend_to_split(tiling, mode, states, work, block, slice_id, thread)
                grid = T.meta_var([blocks, -(-group_size // MERGED_ROWS)])
                with isa.launch(grid, *MERGE_BLOCK_SIZE, waits=False) as ((block, rows), thread):
                    work = PageSchedule(*split)
                    merge_states(states, work, block, rows, thread)

        if len(roomy) > 0:
            if isa.block_shared_bytes() >= roomy[0].min_blocks * roomy[0].resident_bytes:
                attend(roomy[0], a.rotary_mode)
            else:
                attend(tiling, a.rotary_mode)
        elif code_tiling is None:
            attend(tiling, a.rotary_mode)
        elif a.rotary_mode is None or not has_rope(spec):
            attend(code_tiling, None)
        elif a.rotary_mode == 1:
            attend(tiling, a.rotary_mode)
        else:
            attend(code_tiling, None)

    return decode


def decode_windowed(spec: KernelSpec):
    """Build `decode` with ``lengths [3, B]``, as the stock cache passes it for windows."""
    return decode(spec, DECODE_WINDOWED)


def decode_sliding(spec: KernelSpec):
    """Build `decode` for layers with a `window`."""
    return decode(spec, DECODE_SLIDING)


@inline
def load_q(spec, tiling, q_tile, threads, q, work, first_row):
    """Start to copy the query rows of a pair, from one of its KV head's on."""
    per_chunk = T.meta_var(tiling.q.per_chunk)
    row_at = T.meta_var(lambda row: (as_int64(work.sequence), head_of(spec, work, first_row + row)))
    source = T.meta_var(lambda row, chunk: (q, (*row_at(row), chunk * per_chunk)))
    num_rows = T.meta_var(min(tiling.rows, spec.group_size))
    copy_rows(q_tile, num_rows, spec.qk_head_dim // per_chunk, threads, source)
    q_tile.isa.commit_copies()


def head_of(spec: KernelSpec, work: PageSchedule, row):
    """Return the query head of a row; those behind the last one are that of the last one."""
    return work.head * spec.group_size + T.min(row, spec.group_size - 1)


@inline
def set_rows(spec, logits, work, first_row, position):
    """Let the rows of a thread be those of the pair's query heads."""
    if logits.has_alibi:
        for h in T.unroll(logits.rows):
            row = T.meta_var(first_row + T.truncdiv(logits.lane, ROW_LANES) + 8 * h)
            logits.set_row(h, head_of(spec, work, row), position)


@inline
def prepare_q(tiling, q_tile, threads, rope, products, position):
    """Rotate the query rows, and give their columns the order that codes have."""
    blocks = T.meta_var(hadamard_blocks(tiling)[0])
    rope.rotate(q_tile, 0, tiling.rows, threads, lambda row: position)
    if len(blocks) > 0:
        rotate_rows(q_tile, 0, tiling.rows, blocks, threads)
        q_tile.isa.sync_block()
    products.reorder_q(threads)


def code_tiling_of(spec: KernelSpec) -> DecodeTiling | None:
    """Return the tiling for codes that are widened in registers, if there are enough of them.

    They are not where K has to be rotated before it is multiplied.
    """
    tiling = DecodeTiling.of(spec)
    has_registers = spec.codec and (spec.codec.bits == 8 or tiling.columns <= MAX_PACKED_COLUMNS)
    return DecodeTiling.of(spec, is_widened=False) if has_registers and tiling.is_tensor else None


def warps_of(isa, tiling: DecodeTiling, thread, group) -> ThreadGroup:
    """Return the warps of a group, which take every few tiles of positions."""
    sync = isa.sync_warp if tiling.row_warps == 1 else isa.sync_block
    return ThreadGroup(thread, tiling.num_group_threads, sync, group, tiling.kv_groups)
