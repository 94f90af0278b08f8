# SPDX-License-Identifier: Apache-2.0
"""The recurrence of linear attention, token by token: decode, prefill and replay.

The columns of a state do not depend on each other: a warp takes some of a head through all tokens
of a sequence, in registers. Its lanes share the rows of these columns in groups, and sums over rows
go through a few shuffles. A segment reads its state once and writes it once, and what a token needs
is loaded while the token before is worked on.
"""

import math
from typing import NamedTuple

from tvm.script import tirx as T

from ...define import attributes
from ...ingredients import Ingredients
from ...recurrent_spec import RecurrentSpec
from ...script import inline, prim_func
from ...signatures.states import RECURRENT_SCAN, ScanInputs
from ...spec import ITEMSIZE
from ..isa import isa_of
from ..registers import F32, WARP, Registers
from .recurrent_token import RecurrentToken

MAX_KEPT = 112  # registers of a thread for the state and the rows of k, q and decays
MAX_WARPS = 2  # of a block: more would leave multiprocessors idle where sequences are few


class Tiling(NamedTuple):
    """The part of a state that a warp keeps.

    Attributes
    ----------
    rows, columns : int
        Of a thread; consecutive ones.
    groups : int
        Lanes that share the rows of these columns.
    """

    rows: int
    columns: int
    groups: int

    @property
    def width(self) -> int:
        """Columns of a warp."""
        return WARP // self.groups * self.columns


def tiling_of(spec: RecurrentSpec) -> Tiling:
    """Choose as few shuffles as the registers allow, and no more columns than there are."""
    columns = math.gcd(spec.value_dim, 4)
    # As float32, and as they lie in memory, for the next token.
    operands = 2 + 2 * ITEMSIZE[spec.dtype] / 4 + 2 * spec.decays_by_channel
    for groups in (1, 2, 4, 8, 16, 32):
        tiling = Tiling(spec.key_dim // groups, columns, groups)
        fits = tiling.rows * (columns + operands) <= MAX_KEPT and tiling.width <= spec.value_dim
        if fits or spec.key_dim % (2 * groups):
            return tiling
    return tiling


def recurrent_scan(spec: RecurrentSpec):
    """Build the kernel `recurrent_scan`."""
    isa, num_heads, value_dim = isa_of(spec.target), spec.num_heads, spec.value_dim
    tiling = tiling_of(spec)
    num_tiles = -(-value_dim // tiling.width)  # of a head
    num_warps = math.gcd(num_heads * num_tiles, MAX_WARPS)
    is_partial = value_dim % tiling.width != 0

    @prim_func(arguments=RECURRENT_SCAN.of(spec))
    def recurrent_scan(a: ScanInputs):
        T.func_attr(attributes(spec.rows))
        slots, rows, row_indptr = T.meta_var((a.slots, a.rows, a.row_indptr))
        states = T.meta_var(a.states)
        segment_indptr, read_pages, write_pages = T.meta_var(
            (a.segment_indptr, a.read_pages, a.write_pages)
        )
        num_sequences = T.meta_var(segment_indptr.shape[0] - 1)
        kept = T.meta_var(Ingredients.of(a.pages, spec))

        grid = T.meta_var([num_sequences, num_heads * num_tiles // num_warps])
        with isa.launch(grid, num_warps * WARP) as ((sequence, part), thread):
            warp, lane = T.truncdiv(thread, WARP), T.truncmod(thread, WARP)
            tile = part * num_warps + warp
            head = T.truncdiv(tile, num_tiles)
            first_row = T.truncmod(lane, tiling.groups) * tiling.rows
            column = (
                T.truncmod(tile, num_tiles) * tiling.width
                + T.truncdiv(lane, tiling.groups) * tiling.columns
            )
            is_there = T.cast(column < value_dim, "int32")
            if is_partial:  # lanes past the last column repeat the last ones, and store nothing
                column = T.min(column, value_dim - tiling.columns)
            state = T.alloc_local((tiling.rows, tiling.columns), F32, layout=None)
            sums = T.alloc_local((tiling.columns,), F32, layout=None)
            written = T.alloc_local((tiling.columns,), F32, layout=None)
            token = RecurrentToken(spec, tiling.rows, tiling.columns, a.q, kept, a.scale)

            @inline
            def clear():
                """Begin sums with zeros."""
                for j in T.unroll(tiling.columns):
                    sums[j] = T.float32(0)

            @inline
            def sum_up():
                """Let all lanes of a group have the sums over all rows."""
                for j in T.unroll(tiling.columns):
                    sums[j] = isa.over_lanes(sums[j], lambda x, y: x + y, tiling.groups)

            if sequence < num_sequences:
                first_segment, end_segment = segment_indptr[sequence], segment_indptr[sequence + 1]
                first_token, end_token = row_indptr[first_segment], row_indptr[end_segment]
                row = -1
                next_slot, next_row = 0, -1
                if first_token < end_token:
                    row = rows[first_token]
                    token.request(slots[first_token], row, head, first_row, column)
                    ahead = T.min(first_token + 1, end_token - 1)
                    next_slot = slots[ahead]
                    next_row = rows[ahead]
                held = -1  # the page whose state is in registers
                for segment in range(first_segment, end_segment):
                    begin, end = row_indptr[segment], row_indptr[segment + 1]
                    source, sink = read_pages[segment], write_pages[segment]
                    if begin < end:
                        if source < 0:
                            for i in T.unroll(tiling.rows):
                                for j in T.unroll(tiling.columns):
                                    state[i, j] = T.float32(0)
                        else:
                            if source != held:
                                for i in T.unroll(tiling.rows):
                                    at = T.meta_var((source, head, first_row + i, column))
                                    values = T.meta_var(isa.load_floats(states, at, tiling.columns))
                                    for j in T.unroll(tiling.columns):
                                        state[i, j] = values[j]
                        for n in range(begin, end):
                            token.take()
                            own_row = row
                            row = next_row
                            token.request(next_slot, next_row, head, first_row, column)
                            ahead = T.min(n + 2, end_token - 1)
                            next_slot = slots[ahead]
                            next_row = rows[ahead]
                            if spec.is_delta:
                                clear()
                                for i in T.unroll(tiling.rows):
                                    factor = token.k[i] * token.decay(i)
                                    for j in T.unroll(tiling.columns):
                                        sums[j] = isa.fused_multiply_add(
                                            factor, state[i, j], sums[j]
                                        )
                                sum_up()
                                for j in T.unroll(tiling.columns):
                                    written[j] = token.beta[0] * (token.v[j] - sums[j])
                            else:
                                for j in T.unroll(tiling.columns):
                                    written[j] = token.v[j]
                            for i in T.unroll(tiling.rows):
                                for j in T.unroll(tiling.columns):
                                    decayed = state[i, j] * token.decay(i)
                                    state[i, j] = isa.fused_multiply_add(
                                        token.k[i], written[j], decayed
                                    )
                                isa.round_floats(state, i, tiling.columns, spec.state_dtype)
                            if own_row >= 0:
                                clear()
                                for i in T.unroll(tiling.rows):
                                    for j in T.unroll(tiling.columns):
                                        sums[j] = isa.fused_multiply_add(
                                            token.q[i], state[i, j], sums[j]
                                        )
                                sum_up()
                                if is_there != 0 and first_row == 0:
                                    at = T.meta_var((own_row, head, column))
                                    isa.store_floats(a.o, at, Registers.of(sums))
                        if is_there != 0:
                            for i in T.unroll(tiling.rows):
                                for j in T.unroll(tiling.columns):
                                    sums[j] = state[i, j]
                                at = T.meta_var((sink, head, first_row + i, column))
                                isa.store_floats(states, at, Registers.of(sums))
                        held = sink

    return recurrent_scan
