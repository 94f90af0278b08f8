# SPDX-License-Identifier: Apache-2.0
"""The recurrence of linear attention, token by token: decode, prefill and replay.

A state is a matrix per head, and its columns do not depend on each other. Where sequences have few
tokens, the states come from memory: a task updates heads where they lie, one after another, and
asks for the next one meanwhile. Where they have many, a task copies some columns of a head to the
L1 cache, and takes them through all tokens of the sequence. (Where they lie, rows are so far apart
that they share few sets of that cache.)

Forms that treat many tokens at once multiply more, and their results depend on where tokens are cut
into chunks; here a state has the same bits however its tokens came.
"""

from tvm.script import tirx as T

from ...define import target_attributes
from ...ingredients import Ingredients
from ...layout import slot_offset, slot_page
from ...recurrent_spec import RecurrentSpec
from ...script import inline, prim_func
from ...signatures.states import RECURRENT_SCAN, ScanInputs
from ..isa.simd import F32, import_llvm, require_half_target
from ..tasks import TASKS, Queue
from ..worker import SERIAL_BELOW_BYTES
from .recurrent_token import RecurrentToken
from .state_columns import Place, StateColumns, blocks_of
from .state_items import FEW_TOKENS, StateItems, StateWork
from .state_numbers import words_of


def recurrent_scan(spec: RecurrentSpec):
    """Build the kernel that takes states through tokens whose ingredients lie in pages.

    A sequence consists of segments, at whose ends its state is kept: ``segment_indptr[b] ..
    segment_indptr[b + 1]``. Segment i has the tokens ``row_indptr[i] .. row_indptr[i + 1]``, begins
    with the state in page ``read_pages[i]`` (-1: zeros) and leaves the one behind its last token in
    ``write_pages[i]``, which may be the same page. A segment without tokens writes nothing.
    Segments of a sequence run in order, so one may read what an earlier one wrote. Sequences run in
    parallel, so none writes a page that another one reads or writes.

    Token n takes its ingredients from ``slots[n]``, its query from row ``rows[n]`` of q, and writes
    the same row of o. A token whose row is -1 is replayed: it changes the state alone.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """
    num_heads, key_dim, value_dim = spec.num_heads, spec.key_dim, spec.value_dim
    got = f"dtype={spec.dtype}, state_dtype={spec.state_dtype}"
    require_half_target(spec.target, [spec.dtype, spec.state_dtype], got)
    page_size = spec.page_size
    wide, narrow = blocks_of(spec)

    @prim_func(arguments=RECURRENT_SCAN.of(spec))
    def recurrent_scan(a: ScanInputs):
        T.func_attr(target_attributes(on_cpu=True))
        slots, rows, row_indptr = T.meta_var((a.slots, a.rows, a.row_indptr))
        segment_indptr, read_pages, write_pages = T.meta_var(
            (a.segment_indptr, a.read_pages, a.write_pages)
        )
        num_tokens, num_segments = T.meta_var((slots.shape[0], read_pages.shape[0]))
        kept = T.meta_var(Ingredients.of(a.pages, spec))
        numbers = T.meta_var(words_of(a.states))

        num_sequences = T.if_then_else(num_tokens > 0, segment_indptr.shape[0] - 1, 0)
        tiles = T.meta_var(value_dim // narrow.width)
        work = StateWork(num_heads, tiles, segment_indptr, row_indptr, num_sequences, num_tokens)
        work.begin(T.cast(num_tokens, "int64") * spec.state_bytes < SERIAL_BELOW_BYTES)
        queue = Queue()
        queue.begin()
        import_llvm(Queue.llvm_helper)

        @inline
        def load_token(token, n, head):
            """Load token n."""
            page, offset = slot_page(slots[n], page_size), slot_offset(slots[n], page_size)
            token.load(T.bitwise_and(n, 1), page, offset, rows[n], head)

        @inline
        def step(columns, n, head, column, source, sink, recalls, ahead):
            """Take columns through token n, which has recalled."""
            turn, row, slot = T.bitwise_and(n, 1), rows[n], slots[n]
            page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
            columns.write(turn, kept, page, offset, head, column)
            if row >= 0:
                columns.update(turn, source, sink, True, recalls, ahead)
                columns.answer(a.o, row, head, column)
            else:
                columns.update(turn, source, sink, False, recalls, ahead)

        @inline
        def update_in_place(columns, sequence, head, column, ahead, next_token):
            """Take columns through a few tokens, where they lie."""
            token = T.meta_var(columns.token)
            for segment in range(segment_indptr[sequence], segment_indptr[sequence + 1]):
                begin, end = row_indptr[segment], row_indptr[segment + 1]
                page, sink_page = read_pages[segment], write_pages[segment]
                sink = T.meta_var(Place(numbers, (sink_page, head), column))
                if T.And(page < 0, begin < end):
                    columns.clear(sink)
                    page = sink_page
                source = T.meta_var(Place(numbers, (page, head), column))
                for n in range(begin, end):
                    is_last = T.meta_var(n + 1 == end)
                    after = T.if_then_else(is_last, next_token, n + 1)
                    of_head = T.if_then_else(is_last, ahead.index[1], head)
                    token.prefetch(slots[after], rows[after], of_head, (column, wide.width))
                    load_token(token, n, head)
                    if spec.is_delta:
                        columns.recall(T.bitwise_and(n, 1), source)
                    is_asked = T.meta_var(T.cast(is_last, "int32"))
                    step(columns, n, head, column, source, sink, False, (ahead, is_asked))
                    page = sink_page

        @inline
        def update_tile(columns, tile, sequence, head, column):
            """Take columns through many tokens, in a tile."""
            token = T.meta_var(columns.token)
            for segment in range(segment_indptr[sequence], segment_indptr[sequence + 1]):
                begin, end = row_indptr[segment], row_indptr[segment + 1]
                page, sink_page = read_pages[segment], write_pages[segment]
                if begin < end:
                    if page < 0:
                        columns.clear(tile)
                    else:
                        columns.copy(Place(numbers, (page, head), column), tile)
                    load_token(token, begin, head)
                    if spec.is_delta:
                        columns.recall(T.bitwise_and(begin, 1), tile)
                    for n in range(begin, end):
                        after = T.min(n + 2, end - 1)
                        token.prefetch(slots[after], rows[after], head, (column, narrow.width))
                        if n + 1 < end:
                            load_token(token, n + 1, head)
                        step(columns, n, head, column, tile, tile, spec.is_delta, None)
                    columns.copy(tile, Place(numbers, (sink_page, head), column))

        for _ in T.parallel(work.num_tasks, annotations=TASKS):
            token = RecurrentToken(spec, a.q, kept, a.scale)
            all_columns = StateColumns(spec, wide, token)
            tile_columns = StateColumns(spec, narrow, token)
            tile = T.meta_var(Place(T.alloc_buffer((key_dim, narrow.width), F32), (), 0))
            items = StateItems(work)
            split = T.cast(queue.take(), "int32")
            while split < work.splits.count:
                items.begin(split)
                while items.has_next():
                    sequence = items.sequence
                    head = items.item // work.num_parts
                    if T.And(items.num_tokens < FEW_TOKENS, work.num_parts == 1):
                        is_last = T.meta_var(head + 1 == num_heads)
                        next_head = T.if_then_else(is_last, 0, head + 1)
                        next_sequence = T.if_then_else(is_last, sequence + 1, sequence)
                        next_sequence = T.min(next_sequence, num_sequences - 1)
                        next_segment = T.min(segment_indptr[next_sequence], num_segments - 1)
                        next_page = T.max(read_pages[next_segment], 0)
                        next_token = T.min(row_indptr[next_segment], num_tokens - 1)
                        for block in range(value_dim // wide.width):
                            column = block * wide.width
                            ahead = T.meta_var(Place(numbers, (next_page, next_head), column))
                            update_in_place(all_columns, sequence, head, column, ahead, next_token)
                    else:
                        first_tile = items.item % work.num_parts
                        num_tiles = T.if_then_else(work.num_parts == 1, tiles, 1)
                        for i in range(first_tile, first_tile + num_tiles):
                            update_tile(tile_columns, tile, sequence, head, i * narrow.width)
                    items.advance()
                split = T.cast(queue.take(), "int32")

    return recurrent_scan
