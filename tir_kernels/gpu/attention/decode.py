# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The work is bound by reading K and V once, so it is split by pages: as many blocks as the GPU holds
take equal splits of the pages of all sequences and KV heads, whatever their lengths are. A block
finds its split from the page table's starts, so every batch of a shape is launched alike. A KV head
of a sequence that falls into one split is finished there; one that is cut leaves partial states,
which a second kernel merges.

The warps of a block form groups. Each group takes every few tiles of positions, runs a softmax of
its own and waits for no other; the states of the groups are merged in the end.

Events of a block with KV heads 0, 1, .. in its split, and s stages for each group::

    begin_head 0        start to copy Q, and the first s - 1 tiles of each group
    attend_to_head 0    barrier of the block, Q is rotated; then each group, for its tiles t:
                            wait for tile t, barrier of the group
                            start to copy its tile s - 1 later, where tile t - 1 was
                            S = Q K^T, P = softmax(S), O += P V
    finish_head 0       barrier; O and its logs of each group go to where K and V were
    begin_head 1        as before, if the states leave room: else after `store_head`
    store_head 0        barrier; all threads merge the states of the groups, and store
    attend_to_head 1    ..
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
from ..registers import WARP, index_temp
from ..scores.softmax import ROW_LANES, Logits, OnlineSoftmax, products_of
from ..scores.visible_columns import VisibleColumns
from ..tiles.code_pipeline import kv_pipeline
from ..tiles.decode_tiling import DecodeTiling
from ..tiles.kv_rows import paged_rows, with_page_views
from ..tiles.pipeline import ThreadGroup, copy_rows, zero_padding
from ..tiles.rotations import InlineRope, hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.shared_tiles import SharedTiles
from ..work.page_schedule import PageSchedule
from ..work.partial_states import MERGE_BLOCK_SIZE, MERGED_ROWS, BlockStates, GroupStates

MAX_PACKED_COLUMNS = 128  # of V with codes of 4 bits: 256 spilled 148 bytes


def decode(spec: KernelSpec, signature: Signature = DECODE):
    """Build `decode`, or another kernel of its kind that `signature` belongs to.

    With a `window` a row sees the last positions of its pages, or those of its chunk. The cost
    scales with the window, but work is balanced among blocks only if the page table has few pages
    before it.
    """
    isa, group_size = isa_of(spec.target), spec.group_size
    (*roomy, tiling), code_tiling = DecodeTiling.choices(spec), code_tiling_of(spec)

    @prim_func(arguments=signature.of(spec))
    def decode(arguments: PagedInputs):
        T.func_attr(attributes(spec))
        require_own_rotation(spec, arguments)
        a = T.meta_var(with_page_views(spec, arguments))
        sequences = T.meta_var(sequences_of(spec, a, index_temp))

        @inline
        def attend(tiling, mode):
            num_slices = T.meta_var(tiling.row_slices * tiling.slices)
            block = T.meta_var((tiling.num_bytes, tiling.min_blocks))
            num_blocks = T.meta_var(isa.resident_blocks(*block, num_slices))
            states = BlockStates(spec, num_blocks)
            positions = T.meta_var(tiling.block_positions)
            split = T.meta_var((spec, a.page_indptr, a.batch_size, num_blocks, positions))
            with states.allocated():
                grid, size = T.meta_var([num_blocks, num_slices]), T.meta_var(tiling.block_size)
                with isa.launch(grid, *size, waits=False) as (blocks, thread):
                    work = PageSchedule(*split)
                    attend_to_split(spec, a, sequences, tiling, mode, states, work, blocks, thread)
                grid = T.meta_var([num_blocks, -(-group_size // MERGED_ROWS)])
                with isa.launch(grid, *MERGE_BLOCK_SIZE, waits=False) as ((block, rows), thread):
                    work = PageSchedule(*split)
                    merge_states(spec, a, states, work, block, rows, thread)

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
def attend_to_split(spec, a, sequences, tiling, mode, states, work, blocks, thread):
    """Attend to a block's split of the pages, one KV head of a sequence after the other.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
    sequences : WholeSequence
        What `lengths` tells.
    tiling : DecodeTiling
    mode : int32 expression or None
        The argument `rotary_mode`.
    states : BlockStates
    work : PageSchedule
    blocks : tuple of int32 expressions
        The block, and its slice of query heads and of the columns of V.
    thread : int32 expression
    """
    # ---- Setup -----------------------------------------------------------------------------------
    isa = T.meta_var(isa_of(spec.target))
    block, slice_id = T.meta_var(blocks)
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
    kv_rows = paged_rows(spec, a.pages, a.page_ids, tiling.rows_per_thread)
    pipeline = kv_pipeline(spec, tiling, shared, q_tile.end, warps, v_slice, kv_rows)
    k, v = T.meta_var((pipeline.k, pipeline.v))
    products = isa.decode_products(tiling, q_tile, pipeline, warp_row, lane)
    scales = products.scales
    scores = products_of(tiling.positions, tiling.rows_of_thread)
    logits = Logits(spec, tiling.rows_of_thread, lane)
    softmax = OnlineSoftmax(isa, tiling.rows_of_thread)
    o = products_of(tiling.columns, tiling.rows_of_thread)
    rope = InlineRope(spec, mode)
    columns = VisibleColumns(a, sequences)
    groups = GroupStates(tiling, shared)
    factor = a.sm_scale * T.float32(LOG2E)

    @inline
    def load():
        """Start to copy Q, and the first tiles of K and V of a range of columns."""
        if columns.first < columns.end:
            zero_padding(q_tile, spec.qk_head_dim, threads.thread, threads.num_threads)
            zero_padding(k, spec.qk_head_dim, threads.thread, threads.num_threads)
            if spec.qk_head_dim % k.layout.per_chunk != 0:  # the chunk holds codes as well
                threads.sync()
            load_q(spec, tiling, q_tile, threads, a.q, work, first_row)
            pipeline.begin(columns.first, columns.end)

    @inline
    def begin_head():
        """Find the next KV head's rows and columns, and load, if there is room beside states."""
        work.advance()
        kv_rows.begin(work.first_entry, work.head)
        columns.begin(work.sequence, work.num_pages)
        rope.begin(columns.length)
        columns.take(0, work)
        if tiling.copies_beside_states:
            load()

    @inline
    def compute():
        """Attend to a range of columns; each group takes tiles of its own."""
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
            products.qk(scores, k, stage)  # S = Q K^T
            scales.scale_scores(scores, stage, lane)
            logits.scale(scores, factor, k_position)
            if first + tiling.positions > columns.end:
                logits.hide(scores, lambda h, i: first + i < columns.end)
            weights = T.meta_var(softmax.update(scores, o))  # P, in the registers of S
            scales.scale_weights(weights, o, stage, lane)
            products.pv(o, weights, v, stage)  # O += P V

    @inline
    def attend_to_head():
        """Attend to all that the row sees of the KV head in the split: one range, or two."""
        softmax.reset(o)
        scales.reset()
        for span in T.serial(columns.gap.num_spans):
            if span > 0 or not tiling.copies_beside_states:
                isa.sync_block()  # none reads any more what lies there
                columns.take(span, work)
                load()
            if columns.first < columns.end:
                compute()

    @inline
    def finish_head():
        """Leave the groups' rows of O and their logs in shared memory."""
        softmax.finish(o)
        scales.finish(o)
        rotate_accumulators(isa, o, hadamard_blocks(tiling)[1], lane)
        isa.sync_block()  # none reads K and V any more
        groups.put(group, warp_row, o, softmax.lse, products)
        groups.name(work, states.slot(block, work.first > 0))

    @inline
    def store_head():
        """Merge the groups' rows, into O or a partial state."""
        groups.has_rows = 0
        isa.sync_block()  # all states are there
        groups.store(a, states, first_row, v_slice * tiling.columns, thread)

    # ---- The loop, as drawn above ----------------------------------------------------------------
    groups.has_rows = 0
    work.take_split(block, lane)
    isa.wait_for_kernels_before()
    while work.has_next() or groups.has_rows != 0:
        has_next = T.cast(work.has_next(), "int32")
        if has_next != 0:
            begin_head()
        if groups.has_rows != 0:
            store_head()  # of the KV head before
        if has_next != 0:
            attend_to_head()
            finish_head()


@inline
def merge_states(spec, a, states, work, block, rows, thread):
    """Merge the KV head that begins in the block's split and ends in a later one."""
    group_size = T.meta_var(spec.group_size)
    lane = T.truncmod(thread, WARP)
    row = rows * MERGED_ROWS + T.truncdiv(thread, WARP)
    work.find_cut(block, lane)
    states.isa.wait_for_kernels_before()
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
def load_q(spec, tiling, q_tile, threads, q, work, first_row):
    """Start to copy the query rows of a KV head, from one of them on."""
    isa, per_chunk = T.meta_var((q_tile.isa, tiling.q.per_chunk))
    row_at = T.meta_var(lambda row: (isa.wide(work.sequence), head_of(spec, work, first_row + row)))
    source = T.meta_var(lambda row, chunk: (q, (*row_at(row), chunk * per_chunk)))
    num_rows = T.meta_var(min(tiling.rows, spec.group_size))
    copy_rows(q_tile, num_rows, spec.qk_head_dim // per_chunk, threads, source)
    isa.commit_copies()


def head_of(spec: KernelSpec, work: PageSchedule, row):
    """Return the query head of a row; rows past the end have that of the last one."""
    return work.head * spec.group_size + T.min(row, spec.group_size - 1)


@inline
def set_rows(spec, logits, work, first_row, position):
    """Let the rows of a thread be those of the KV head's query heads."""
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
