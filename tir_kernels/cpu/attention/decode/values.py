# SPDX-License-Identifier: Apache-2.0
"""The output of a decode split's rows: weighted rows of V, read as they lie in the pages.

Pairs of bfloat16 are pairs of positions here. They are made of the words of two rows where these
are: of each chunk the even columns come first, then the odd ones. Sums are kept in that order, and
put into that of the columns once at the end.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...columns import chunks, for_columns
from ...simd import Register, broadcast, elements_per_line, index_temp, load, shuffle, store, temp
from .blocking import DecodeStep
from .scores import SOON

STRIP = 16  # rows of V that are read in all their columns before the next ones


class Values:
    """Adds weighted rows of V to the rows of O.

    Parameters
    ----------
    split : split.DecodeSplit
        Has O, the packed weights and the decays of the softmax.
    """

    def __init__(self, split):
        self.spec, self.ops, self.lanes = split.spec, split.ops, split.lanes
        self.split, self.rows = split, range(split.blocking.rows)
        self.elements = self.spec.v_head_dim // self.ops.numbers  # of a row
        self.elements_at_once = max(1, split.blocking.vectors // self.ops.numbers)

    def block(self, step: DecodeStep, first_row, weights_row) -> None:
        """Add the weighted rows of a block; those that are not visible are not read.

        All columns of a few rows come before the next rows, so that memory is read in order.
        """
        self._decay(first_row)
        with T.serial((step.count + STRIP - 1) // STRIP) as i:
            left = index_temp(T.min(STRIP, step.count - i * STRIP))
            for_columns(
                self.elements,
                self.lanes,
                self.elements_at_once,
                lambda start, parts: self._strip(
                    step, first_row, weights_row, (start, parts), (i * STRIP, left)
                ),
            )

    def in_column_order(self, num_rows) -> None:
        """Put the sums of the first rows into the order of the columns."""
        if self.ops.numbers == 1:
            return
        o = self.split.o
        with T.serial(num_rows) as row:
            for c in chunks(self.elements, self.lanes):
                at = [(row, self._column(c.start, n, c.lanes)) for n in range(2)]
                halves = [temp(load(o, i, c.lanes), c.lanes) for i in at]
                order = [n * c.lanes + i for i in range(c.lanes) for n in range(2)]
                for n, i in enumerate(at):
                    half = order[n * c.lanes : (n + 1) * c.lanes]
                    store(o, i, c.lanes, shuffle(halves, half))

    def _column(self, element, n: int, lanes: int):
        """Return where the sums of the n-th numbers of `lanes` elements begin."""
        return element * self.ops.numbers + n * lanes

    def _decay(self, first_row) -> None:
        split = self.split
        with T.serial(len(self.rows)) as r:
            for c in chunks(self.spec.v_head_dim, self.lanes):
                decay = split.state.rescale[split.row_state(first_row + r)]
                at = (first_row + r, c.start)
                value = load(split.o, at, c.lanes) * broadcast(decay, c.lanes)
                store(split.o, at, c.lanes, value)

    def _strip(self, step: DecodeStep, first_row, weights_row, columns, positions) -> None:
        """Add some columns of a strip: of `positions`, which are (first of the block, number)."""
        (start, parts), (column, left) = columns, positions
        run, o = min(step.rows.run, STRIP), self.split.o
        at = {
            (r, c, n): (first_row + r, self._column(start + c.start, n, c.lanes))
            for r in self.rows
            for c in parts
            for n in range(self.ops.numbers)
        }
        total = {
            (r, c, n): Register(c.lanes, init=load(o, i, c.lanes)) for (r, c, n), i in at.items()
        }
        if run == STRIP:
            self._add_rows(step, total, weights_row, columns, (column, left))
        else:
            with T.serial((left + run - 1) // run) as j:
                within = index_temp(column + j * run)
                positions = (within, T.min(run, left - j * run))
                self._add_rows(step, total, weights_row, columns, positions)
        for (r, c, n), value in total.items():
            store(o, at[r, c, n], c.lanes, value.get())

    def _add_rows(self, step: DecodeStep, total, weights_row, columns, positions) -> None:
        (start, parts), (column, num_rows) = columns, positions
        ops, run = self.ops, min(step.rows.run, STRIP)
        tile = step.rows.tile(step.first + column, run)
        following = step.following.tile(step.following_first + column, run)
        line = elements_per_line(self.spec.v_dtype) // ops.numbers

        def prefetch(t, at):
            following.prefetch_v(t, at)
            following.prefetch_k(t, at)
            if run > SOON:
                tile.prefetch_v(t + SOON, at)

        hidden, begin, end = 0, 0, (num_rows + ops.numbers - 1) // ops.numbers
        if step.before is not None:
            hidden = index_temp(T.max(step.before - column, 0))
            begin = index_temp(hidden // ops.numbers)
            end = T.if_then_else(hidden < num_rows, end, begin)
        with T.serial(begin, end) as i:
            # A row that is not visible has no weight, but its neighbour is what is multiplied.
            t = [i * ops.numbers + n for n in range(ops.numbers)]
            if ops.numbers > 1:
                t = [index_temp(T.min(T.max(x, hidden), num_rows - 1)) for x in t]
            for c in parts:
                if c.start % line == 0:
                    for x in t:
                        prefetch(x, (start + c.start) * ops.numbers)
            element = column // ops.numbers + i
            weight = [
                temp(self.split.packed[weights_row + r, element], 1, ops.dtype) for r in self.rows
            ]
            for c in parts:
                values = ops.load_v(tile, t, start + c.start, c.lanes)
                for n, value in enumerate(values):
                    value = temp(value, c.lanes, ops.dtype)
                    for r in self.rows:
                        ops.multiply_add(total[r, c, n], broadcast(weight[r], c.lanes), value)
