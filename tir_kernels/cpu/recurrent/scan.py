# SPDX-License-Identifier: Apache-2.0
"""The recurrence of linear attention, token by token: decode, prefill and replay.

A state is a matrix per head, and its columns do not depend on each other: a task takes some columns
of a head through all tokens of a sequence. They fit the caches of a core, so a step of one token
reads and writes the state once, and longer ones take what their multiplications take. Forms that
treat many tokens at once multiply more, and their results depend on where tokens are cut into
chunks; here a state is the same bits however its tokens came.
"""

import math
from typing import NamedTuple

from tvm.script import tirx as T

from ...define import target_attributes
from ...ingredients import Ingredients, match_ingredients
from ...layout import slot_offset, slot_page
from ...recurrent_spec import RecurrentSpec
from ...script import inline, prim_func
from ...signatures.arrays import match_float32, match_int32, row_matcher, sizes
from ..components.recurrent_token import RecurrentToken
from ..components.rows import SERIAL_BELOW_BYTES
from ..components.work import TASKS, Queue, num_threads
from ..conversion import require_half_target
from ..simd import F32, broadcast, constant, import_llvm, index_temp, load, multiply_add, store

WIDE_BYTES = 64 * 1024  # of a state that a task works on: a quarter of a small L2 cache
NARROW_BYTES = 16 * 1024  # where there are too few of these for the threads
WIDE_ITEMS = 4  # of a thread, or blocks are narrow
SUMS = 4  # independent vectors of sums, so that multiply-adds do not wait for each other


class Block(NamedTuple):
    """Columns of a state that a task works on.

    Attributes
    ----------
    lanes, vectors : int
        Columns of a vector, and vectors of the block.
    rows : int
        Rows of the state that are summed apart.
    """

    lanes: int
    vectors: int
    rows: int

    @property
    def width(self) -> int:
        """Columns of the block."""
        return self.vectors * self.lanes


def blocks_of(spec: RecurrentSpec) -> tuple[Block, Block]:
    """Choose a wide block and a narrow one, whose sums have the same order.

    A wide block is contiguous memory where it has all columns, and loads k and q less often. Its
    sums and what is written take most registers.
    """
    lanes = math.gcd(spec.value_dim, spec.target.lanes)

    def vectors_of(num_bytes: int, most: int) -> int:
        fitting = max(1, num_bytes // (4 * spec.key_dim * lanes))
        return math.gcd(spec.value_dim // lanes, most, 1 << fitting.bit_length() - 1)

    narrow = vectors_of(NARROW_BYTES, SUMS)
    wide = max(narrow, vectors_of(WIDE_BYTES, spec.target.registers // 4))
    rows = math.gcd(spec.key_dim, SUMS // narrow)
    return Block(lanes, wide, rows), Block(lanes, narrow, rows)


@T.meta_class
class Columns:
    """Sums over the rows of a state, for a block of its columns."""

    def __init__(self, block: Block):
        self.lanes, self.vectors, self.rows = block
        self.width = block.width
        self.sums = T.alloc_local((self.rows, self.width), F32)

    def at(self, j):
        """Return the lanes of vector j."""
        return T.ramp(j * self.lanes, 1, self.lanes)

    @inline
    def clear(self):
        """Start from zeros."""
        for i in T.unroll(self.rows):
            for j in T.unroll(self.vectors):
                self.sums[i, self.at(j)] = constant(0.0, self.lanes)

    @inline
    def add(self, i, j, factor, vector):
        """Add the product of a number and vector j of a row of the state."""
        self.sums[i, self.at(j)] = multiply_add(
            broadcast(factor, self.lanes), vector, self.sums[i, self.at(j)], self.lanes
        )

    def total(self, j):
        """Return vector j of the sums over all rows."""
        total = self.sums[0, self.at(j)]
        for i in range(1, self.rows):
            total = total + self.sums[i, self.at(j)]
        return total


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

    Arguments: q ``[T, num_key_heads, key_dim]``, pages ``[P, page_size, row_width]``, states
    float32 ``[P', num_heads, key_dim, value_dim]``, segment_indptr int32 ``[B + 1]``, row_indptr
    int32 ``[S + 1]``, slots and rows int32 ``[N]``, read_pages and write_pages int32 ``[S]``, o
    ``[T, num_heads, value_dim]``, scale: float32, the factor on q.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """
    num_heads, key_dim, value_dim = spec.num_heads, spec.key_dim, spec.value_dim
    require_half_target(spec.target, [spec.dtype], f"dtype={spec.dtype}")
    match_rows, page_size = row_matcher(spec.rows), spec.page_size
    wide, narrow = blocks_of(spec)

    @prim_func
    def recurrent_scan(
        var_q: T.handle,
        var_pages: T.handle,
        var_states: T.handle,
        var_segment_indptr: T.handle,
        var_row_indptr: T.handle,
        var_slots: T.handle,
        var_rows: T.handle,
        var_read_pages: T.handle,
        var_write_pages: T.handle,
        var_o: T.handle,
        scale: T.float32,
    ):
        T.func_attr(target_attributes(on_cpu=True))
        num_rows, num_pages, num_tokens, num_states, num_starts, num_segments = sizes(6)
        q = match_rows(var_q, num_rows, spec.num_key_heads, key_dim)
        pages = match_ingredients(var_pages, num_pages, spec)
        states = match_float32(var_states, num_states, num_heads, key_dim, value_dim)
        segment_indptr = match_int32(var_segment_indptr, num_starts)
        read_pages = match_int32(var_read_pages, num_segments)
        row_indptr = match_int32(var_row_indptr, num_segments + 1)
        slots = match_int32(var_slots, num_tokens)
        rows = match_int32(var_rows, num_tokens)
        write_pages = match_int32(var_write_pages, num_segments)
        o = match_rows(var_o, num_rows, num_heads, value_dim)
        kept = T.meta_var(Ingredients.of(pages, spec))

        num_heads_in_all = T.cast(num_starts - 1, "int64") * num_heads
        queue = Queue()
        queue.begin()
        import_llvm(Queue.llvm_helper)

        @inline
        def update(token, written, output, source, sink, head, first_column, is_read):
            """Write the state behind a token, and sum up what a query reads of it."""
            lanes = T.meta_var(output.lanes)
            for step in range(key_dim // output.rows):
                for i in T.unroll(output.rows):
                    d = T.meta_var(step * output.rows + i)
                    key, decay = token.k[d], token.decay(d)
                    for j in T.unroll(output.vectors):
                        column = T.meta_var(first_column + j * lanes)
                        old = T.meta_var(load(states, (source, head, d, column), lanes))
                        decayed = T.meta_var(old * broadcast(decay, lanes))
                        new = multiply_add(
                            broadcast(key, lanes), written[output.at(j)], decayed, lanes
                        )
                        store(states, (sink, head, d, column), lanes, new)
                        if is_read:
                            output.add(i, j, token.q[d], new)

        @inline
        def scan(block):
            """Take all columns of all states through their tokens, a block at a time."""
            blocks = T.meta_var(value_dim // block.width)
            num_items = num_heads_in_all * blocks
            for _ in T.parallel(tasks_for(num_items, num_tokens, spec), annotations=TASKS):
                token = RecurrentToken(spec, q, kept, scale)
                recalled, output = Columns(block), Columns(block)
                written = T.alloc_local((block.width,), F32)
                lanes, vectors = T.meta_var((block.lanes, block.vectors))
                item = queue.take()
                while item < num_items:
                    sequence = T.cast(item // (num_heads * blocks), "int32")
                    head = T.cast(item // blocks % num_heads, "int32")
                    first_column = T.cast(item % blocks, "int32") * block.width
                    for segment in range(segment_indptr[sequence], segment_indptr[sequence + 1]):
                        source, sink = read_pages[segment], write_pages[segment]
                        begin, end = row_indptr[segment], row_indptr[segment + 1]
                        if source < 0:
                            source = sink
                            if begin < end:
                                for d in range(key_dim):
                                    for j in T.unroll(vectors):
                                        at = T.meta_var((sink, head, d, first_column + j * lanes))
                                        store(states, at, lanes, constant(0.0, lanes))
                        for n in range(begin, end):
                            slot, row = slots[n], rows[n]
                            page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                            next_n = T.min(n + 1, end - 1)
                            columns = T.meta_var((first_column, block.width))
                            token.prefetch(slots[next_n], rows[next_n], head, columns)
                            token.load(page, offset, row, head)
                            if spec.is_delta:
                                recalled.clear()
                                for step in range(key_dim // recalled.rows):
                                    for i in T.unroll(recalled.rows):
                                        d = T.meta_var(step * recalled.rows + i)
                                        factor = token.k[d] * token.decay(d)
                                        for j in T.unroll(vectors):
                                            column = T.meta_var(first_column + j * lanes)
                                            old = load(states, (source, head, d, column), lanes)
                                            recalled.add(i, j, factor, old)
                            for j in T.unroll(vectors):
                                at = T.meta_var((page, offset, head, first_column + j * lanes))
                                value = T.meta_var(load(kept.v, at, lanes))
                                if spec.is_delta:
                                    beta = T.meta_var(kept.beta[page, offset, head])
                                    rest = T.meta_var(value - recalled.total(j))
                                    written[output.at(j)] = broadcast(beta, lanes) * rest
                                else:
                                    written[output.at(j)] = value
                            at = T.meta_var((source, sink, head, first_column))
                            if row >= 0:
                                output.clear()
                                update(token, written, output, *at, True)
                                for j in T.unroll(vectors):
                                    o_at = T.meta_var((row, head, first_column + j * lanes))
                                    store(o, o_at, lanes, output.total(j))
                            else:
                                update(token, written, output, *at, False)
                            source = sink
                    item = queue.take()

        if wide == narrow:
            scan(narrow)
        else:
            wide_items = T.meta_var(num_heads_in_all * (value_dim // wide.width))
            if wide_items >= WIDE_ITEMS * T.cast(num_threads(), "int64"):
                scan(wide)
            else:
                scan(narrow)

    return recurrent_scan


def tasks_for(num_items, num_tokens, spec: RecurrentSpec):
    """Return how many tasks share the columns: one where there is little to do."""
    state_bytes = 4 * spec.num_heads * spec.key_dim * spec.value_dim
    is_small = T.cast(num_tokens, "int64") * state_bytes < SERIAL_BELOW_BYTES
    most = T.cast(T.min(num_items, T.cast(num_threads(), "int64")), "int32")
    return index_temp(T.if_then_else(is_small, T.int32(1), most))
