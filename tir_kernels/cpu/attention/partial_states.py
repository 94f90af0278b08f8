# SPDX-License-Identifier: Apache-2.0
"""Results of a split: output rows, or partial states to merge."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.softmax import NOTHING_SEEN, inverse_total, log_sum
from ...spec import KernelSpec
from ..columns import chunks, for_columns
from ..simd import Register, broadcast, constant, exp2, index_temp, load, store, temp, wide_temp
from ..workspace import Workspace
from .decode.split import DecodeSplit

_TOP, _TOTAL = range(2)


class PartialStates:
    """States of the tiles or pairs (sequence, some KV heads) that several splits share.

    A split has two slots: the even one for what an earlier split began, the odd one for what it
    begins and does not end.

    Parameters
    ----------
    spec : KernelSpec
    num_splits : int32 expression
    num_rows : int
        Rows that a slot has room for.
    """

    def __init__(self, spec: KernelSpec, num_splits, num_rows: int):
        self.spec = spec
        self._o = Workspace(num_splits * 2, (num_rows, spec.v_head_dim))
        self._states = Workspace(num_splits * 2, (2, num_rows))
        self.o, self.states = self._o.buffer, self._states.buffer

    def free(self) -> None:
        """Give the memory back, when all is merged."""
        self._states.free()  # the last one first, as the pool likes it
        self._o.free()

    @staticmethod
    def slot(split_id, *, is_continued):
        """The slot of what a split continues, or of what it begins."""
        return split_id * 2 + T.if_then_else(is_continued, 0, 1)

    def put(self, slot, split, num_rows, row_of: Callable = lambda row: row) -> None:
        """Keep the first `num_rows` rows of a split, which lie at ``row_of(row)`` in it."""
        slot = wide_temp(slot)
        with T.serial(num_rows) as row:
            source = index_temp(row_of(row))
            for c in chunks(self.spec.v_head_dim, split.lanes):
                value = load(split.o, (source, c.start), c.lanes)
                store(self.o, (slot, row, c.start), c.lanes, value)
            state = split.row_state(source)
            for n, value in ((_TOP, split.state.row_max), (_TOTAL, split.state.row_sum)):
                T.buffer_store(self.states, value[state], [slot, n, row])

    def merge(self, first_split, count, output, rows) -> None:
        """Finish what `first_split` begins and the ``count - 1`` splits after it continue.

        The lse of a row is put before its columns.

        Parameters
        ----------
        output : Output
        rows : pair (begin, end)
            The rows to finish.
        """
        begin, end = rows
        top, total = Register(1), Register(1)

        def slot(i):
            return T.cast((first_split + i) * 2 + T.if_then_else(i == 0, 1, 0), "int64")

        with T.serial(begin, end) as row:
            top.set(T.float32(NOTHING_SEEN))
            total.set(T.float32(0))
            with T.serial(count) as i:
                top.set(T.max(top.get(), self.states[slot(i), _TOP, row]))
            with T.serial(count) as i:
                factor = exp2(self.states[slot(i), _TOP, row] - top.get(), 1)
                T.buffer_store(self.states, factor, [slot(i), _TOP, row])
                total.set(total.get() + factor * self.states[slot(i), _TOTAL, row])
            output.put_lse(row, log_sum(top.get(), total.get()))
            inverse = temp(inverse_total(total.get()))

            def some_columns(start, parts):
                value = [Register(c.lanes, init=constant(0.0, c.lanes)) for c in parts]
                with T.serial(count) as i:
                    factor = temp(self.states[slot(i), _TOP, row] * inverse)
                    for c, register in zip(parts, value, strict=True):
                        o = load(self.o, (slot(i), row, start + c.start), c.lanes)
                        register.fma(o, broadcast(factor, c.lanes))
                for c, register in zip(parts, value, strict=True):
                    output.put(row, start + c.start, c.lanes, register.get())

            for_columns(self.spec.v_head_dim, self.spec.target.lanes, 4, some_columns)


class Output:
    """Rows of O and LSE of one sequence, from a KV head on."""

    def __init__(self, spec: KernelSpec, o, lse, sequence, head):
        self.o, self.lse, self.sequence = o, lse, sequence
        self.spec, self.first_head = spec, head * spec.group_size

    def put(self, row, column, lanes: int, value) -> None:
        """Store columns of a row."""
        store(self.o, (self.sequence, self.first_head + row, column), lanes, value)

    def put_lse(self, row, value) -> None:
        """Store the log of a row's sum."""
        T.buffer_store(self.lse, value, [self.sequence, self.first_head + row])

    def finish(self, split: DecodeSplit, num_rows) -> None:
        """Store the first `num_rows` rows of a split that is the whole of its sequence."""
        with T.serial(num_rows) as row:
            source = index_temp(split.row_of(row))
            state = split.row_state(source)
            total = temp(split.state.row_sum[state])
            inverse = temp(inverse_total(total))
            for c in chunks(self.spec.v_head_dim, split.lanes):
                o = load(split.o, (source, c.start), c.lanes)
                self.put(row, c.start, c.lanes, o * broadcast(inverse, c.lanes))
            self.put_lse(row, log_sum(split.state.row_max[state], total))

    def clear(self) -> None:
        """Store the result of a sequence that holds nothing."""
        with T.serial(self.spec.group_size) as row:
            for c in chunks(self.spec.v_head_dim, self.spec.target.lanes):
                self.put(row, c.start, c.lanes, constant(0.0, c.lanes))
            self.put_lse(row, log_sum(T.float32(0), T.float32(0)))
