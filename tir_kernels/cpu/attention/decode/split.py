# SPDX-License-Identifier: Apache-2.0
"""One query row per head over a split: a range of positions of one sequence, for some KV heads.

The loop over KV heads is inside the loop over blocks of positions, so that a page is read from
start to end: the heads of a page are adjacent, and sequential reads are faster (by a fifth, for
pages of 4 KiB per head).

A CPU drops prefetches while its miss queue is full, and a dropped line costs the whole latency when
it is needed. Every line is therefore prefetched several times: one head ahead (the same positions
of the next KV head), half a head ahead (lines of K while V is read, and of V while K is), and a few
rows ahead. On Zen 4 one thread reads a quarter more bytes per second in float32; data that is in
the caches already is processed up to 15 % slower.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ....spec import LOG2E, KernelSpec
from ...columns import chunks
from ...components.online_softmax import OnlineSoftmax
from ...simd import F32, broadcast, constant, index_temp, load, store, temp
from ..alibi import AlibiBias
from ..kv_rows import PagedRows
from .blocking import BLOCK, Blocking, DecodeStep
from .scores import Scores
from .values import Values


class DecodeSplit:
    """Attention of one query row to a split of its positions, with a task's buffers for it.

    Its KV heads are numbered from 0 as local heads: the rows of Q, O and the state of one begin at
    ``local_head * padded_rows``.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `kv_operands.single_row_operands` chooses it.
    sm_scale : float32
        Factor of the scores.
    num_local_heads : int
        KV heads that there is room for.
    """

    block = BLOCK

    def __init__(self, spec: KernelSpec, ops, sm_scale, num_local_heads: int = 1):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.blocking = Blocking.of(spec)
        self.factor = temp(sm_scale * T.float32(LOG2E))
        rows, elements = self.blocking.padded_rows, spec.qk_head_dim // ops.numbers
        whole = ops.numbers * self.lanes
        self.row = T.alloc_buffer((-(-spec.qk_head_dim // whole) * whole,), F32)  # that was rotated
        self.rotated = T.alloc_buffer((self.blocking.positions, elements), ops.dtype)  # rows of K
        self.q = T.alloc_buffer((num_local_heads * rows, elements), ops.dtype)
        self.o = T.alloc_buffer((num_local_heads * rows, spec.v_head_dim), F32)
        self.weights = T.alloc_buffer((rows, BLOCK), F32)
        self.packed = self.weights
        if ops.numbers > 1:
            self.packed = T.alloc_buffer((rows, BLOCK // ops.numbers), ops.dtype)
        row_blocks = num_local_heads * self.blocking.row_blocks
        self.state = OnlineSoftmax(row_blocks, self.blocking.rows, self.lanes)
        self.bias = AlibiBias.of(spec, num_local_heads * rows)
        self.scores, self.values = Scores(self), Values(self)

    def row_state(self, row):
        """Index of the state of a row of O in `state.row_max` and `state.row_sum`."""
        rows = self.blocking.rows
        if rows == self.state.stride:
            return row
        return self.state.index(row // rows, row % rows)

    def query_row(self, row) -> tuple:
        """Row of O of the query head `row`, counted over all local heads, its maximum and sum."""
        group, padded = self.spec.group_size, self.blocking.padded_rows
        source = index_temp(row if group == padded else row // group * padded + row % group)
        state = self.row_state(source)
        return source, self.state.row_max[state], self.state.row_sum[state]

    def for_row_blocks(self, local_head, body) -> None:
        """Emit ``body(block, first_row, row)`` for the sets of rows of a KV head.

        `block` and `first_row`, of Q and O, count over all local heads; `row`, of the weights, over
        those of this one.
        """
        rows, row_blocks = self.blocking.rows, self.blocking.row_blocks
        if row_blocks == 1:
            body(local_head, index_temp(local_head * rows), 0)
            return
        with T.serial(row_blocks) as i:
            block = index_temp(local_head * row_blocks + i)
            body(block, index_temp(block * rows), i * rows)

    def start(self, a, sequence, head, local_head=0) -> None:
        """Take the query rows of a KV head, scaled for exp2, and clear its sums."""
        spec, ops, padded_rows = self.spec, self.ops, self.blocking.padded_rows
        base = index_temp(local_head * padded_rows)
        elements = chunks(spec.qk_head_dim // ops.numbers, self.lanes)

        def put_q(row, load_elements):
            for c in elements:
                value = load_elements(c.start, c.lanes)
                store(self.q, (base + row, c.start), c.lanes, value, ops.dtype)

        def plain():
            with T.serial(spec.group_size) as row:
                at = (sequence, head * spec.group_size + row)
                put_q(row, lambda i, lanes: ops.load_q(a.q, (*at, i), lanes, self.factor))

        def rotated():
            a.rope.set_position(a.q_rope_position[sequence])
            with T.serial(spec.group_size) as row:
                at = (sequence, head * spec.group_size + row)
                a.rope.rotate_row(lambda i, lanes: load(a.q, (*at, i), lanes), self.put_in_row)
                put_q(row, lambda i, n: ops.load_rotated_q(self.row, i, n, self.factor))

        a.rope.for_q(rotated, plain)
        if self.bias:
            with T.serial(padded_rows) as row:
                query_head = head * spec.group_size + T.min(row, spec.group_size - 1)
                self.bias.set_row(base + row, query_head, a.q_rope_position[sequence])
        padding = padded_rows - spec.group_size
        if padding:
            with T.serial(padding) as row:
                for c in elements:
                    at = (base + spec.group_size + row, c.start)
                    store(self.q, at, c.lanes, broadcast(T.cast(0, ops.dtype), c.lanes), ops.dtype)
        with T.serial(padded_rows) as row:
            for c in chunks(spec.v_head_dim, self.lanes):
                store(self.o, (base + row, c.start), c.lanes, constant(0.0, c.lanes))
        self.for_row_blocks(local_head, lambda block, *_: self.state.reset(block))

    def put_in_row(self, column, lanes: int, value) -> None:
        """Keep columns of the row that is rotated."""
        store(self.row, (column,), lanes, value)

    def run(
        self,
        a,
        rows: PagedRows,
        begin,
        end,
        k_offset,
        first_visible=None,
        num_local_heads=1,
        restart=0,
    ) -> None:
        """Attend to the positions ``begin .. end - 1``, which RoPE counts from `k_offset`.

        `begin` is aligned to a strip or a page; positions before `first_visible` are hidden. `rows`
        are those of the first local head. Behind the last position, prefetches take the next KV
        heads, from `restart` on.
        """
        with T.serial((end - begin + BLOCK - 1) // BLOCK) as i:
            first = index_temp(begin + i * BLOCK)
            count = index_temp(T.min(BLOCK, end - first))
            before = None if first_visible is None else index_temp(first_visible - first)
            is_end = first + BLOCK >= end
            next_first = index_temp(T.if_then_else(is_end, restart, first + BLOCK))
            next_head = index_temp(T.if_then_else(is_end, num_local_heads, 0))
            with T.serial(num_local_heads) as local_head:
                is_last = local_head == num_local_heads - 1
                step = DecodeStep(
                    rows=rows.of_local_head(local_head),
                    following=rows.of_local_head(
                        T.if_then_else(is_last, next_head, local_head + 1)
                    ),
                    following_first=index_temp(T.if_then_else(is_last, next_first, first)),
                    first=first,
                    count=count,
                    before=before,
                    local_head=local_head,
                )
                self.step(a, step, k_offset)

    def step(self, a, step: DecodeStep, k_offset) -> None:
        """Attend to a block of positions: the steps of online softmax."""
        self.scores.block(a, step, k_offset)
        self.mask(a, step, k_offset)
        self.for_row_blocks(step.local_head, lambda *block: self.attend(step, *block))

    def mask(self, a, step: DecodeStep, k_offset) -> None:
        """Cap the scores of a block, add the bias, and hide what is not visible."""
        if self.spec.logit_softcap is not None:
            self.scores.cap()
        if self.bias:
            padded_rows = self.blocking.padded_rows
            with T.serial(padded_rows) as row:
                base = step.local_head * padded_rows
                position = k_offset + step.first
                self.bias.add(base + row, self.weights, row, position, a.mask.offsets)
        with T.If(self.is_partial(step)), T.Then():
            self.scores.hide(step.count, step.before)

    @staticmethod
    def is_partial(step: DecodeStep):
        """Whether some positions of a block are hidden."""
        is_partial = step.count < BLOCK
        return is_partial if step.before is None else T.Or(is_partial, step.before > 0)

    def attend(self, step: DecodeStep, block, first_row, row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        self.state.update(block, self.weights, row, self.packed, self.ops)
        self.values.block(step, first_row, row)
