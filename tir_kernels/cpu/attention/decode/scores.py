# SPDX-License-Identifier: Apache-2.0
"""The scores of a decode split's rows: a block of K, read as it lies in the pages."""

from __future__ import annotations

from tvm.script import tirx as T

from ....semantics.softmax import HIDDEN
from ...columns import chunks, for_columns
from ...shuffles import next_power_of_two, reduce_each, widen
from ...simd import (
    Register,
    add,
    broadcast,
    constant,
    elements_per_line,
    index_temp,
    load,
    shuffle,
    store,
    temp,
)
from ...soft_cap import soft_cap
from .blocking import DecodeStep

SOON = 8  # positions between a line's last prefetch and its use


class Scores:
    """Multiplies the rows of Q with blocks of K.

    Parameters
    ----------
    split : split.DecodeSplit
        Has Q, room for `rotated` rows of K, and the scores as `weights`.
    """

    def __init__(self, split):
        self.spec, self.ops, self.lanes = split.spec, split.ops, split.lanes
        self.blocking, self.split = split.blocking, split
        self.elements = self.spec.qk_head_dim // self.ops.numbers

    def block(self, a, step: DecodeStep, k_offset) -> None:
        """Multiply a KV head's rows of Q with the rows of K of a block; see `DecodeSplit.step`."""
        at_once = self.blocking.positions
        with T.serial((step.count + at_once - 1) // at_once) as i:
            position = index_temp(step.first + i * at_once)
            paged = step.rows.tile(position, at_once)
            soon = step.rows.tile(position + SOON, at_once)
            following = step.following.tile(step.following_first + i * at_once, at_once)

            def prefetch(t, column):
                following.prefetch_k(t, column)
                paged.prefetch_v(t, column)
                soon.prefetch_k(t, column)

            def multiply(k):
                self.split.for_row_blocks(
                    step.local_head,
                    lambda _, first_row, row: self.tile(k, prefetch, first_row, row, i * at_once),
                )

            def rotated():
                split, dtype = self.split, self.ops.dtype
                with T.serial(at_once) as t:
                    row = step.rows.tile(position + t, 1)
                    a.rope.set_position(k_offset + position + t)
                    a.rope.rotate_row(
                        lambda column, lanes: row.load_k(0, column, lanes), split.put_in_row
                    )
                    for c in chunks(self.elements, self.lanes):
                        value = self.ops.pack(split.row, c.start, c.lanes)
                        store(split.rotated, (t, c.start), c.lanes, value, dtype)
                multiply(lambda t, element, n: load(split.rotated, (t, element), n, dtype))

            def plain():
                multiply(lambda t, element, lanes: self.ops.load_k(paged, t, element, lanes))

            a.rope.either(rotated, plain)

    def tile(self, k, prefetch, first_row, weights_row, column) -> None:
        """Multiply one set of rows with a few rows of K; lines that come next are asked for.

        Parameters
        ----------
        k : ``(row, element, lanes) -> vector``
        prefetch : ``(row, column)``
        """
        split, ops, lanes = self.split, self.ops, self.lanes
        rows, step = range(self.blocking.rows), range(self.blocking.positions)
        total = [[Register(lanes, init=constant(0.0, lanes)) for _ in step] for _ in rows]
        line = elements_per_line(self.spec.k_dtype) // ops.numbers

        def multiply(start, parts):
            for c in parts:
                if c.start % line == 0:
                    for t in step:
                        prefetch(t, (start + c.start) * ops.numbers)
                q = [
                    temp(
                        load(split.q, (first_row + r, start + c.start), c.lanes, ops.dtype),
                        c.lanes,
                        ops.dtype,
                    )
                    for r in rows
                ]
                for t in step:
                    row = temp(k(t, start + c.start, c.lanes), c.lanes, ops.dtype)
                    for r in rows:
                        if c.lanes == lanes:
                            ops.multiply_add(total[r][t], q[r], row)
                        else:
                            narrow = Register(c.lanes, init=constant(0.0, c.lanes))
                            ops.multiply_add(narrow, q[r], row)
                            total[r][t].set(total[r][t].get() + widen(narrow.get(), c.lanes))

        for_columns(self.elements, lanes, max(1, line // lanes), multiply)
        at_once = max(1, lanes // len(step))
        for first in range(0, len(rows), at_once):
            batch = rows[first : first + at_once]
            sums = reduce_each([total[r][t].get() for r in batch for t in step], lanes, add)
            if not ops.scale_in_q:
                width = next_power_of_two(len(batch) * len(step))
                sums = temp(sums * broadcast(split.factor, width), width)
            for i, r in enumerate(batch):
                own = [i * len(step) + t for t in step]
                value = shuffle([sums], own) if len(own) > 1 or len(batch) > 1 else sums
                store(split.weights, (weights_row + r, column), len(step), value)

    def cap(self) -> None:
        """Apply the soft-cap to the scores of a block."""
        weights = self.split.weights
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(self.split.block, self.lanes):
                score = load(weights, (row, c.start), c.lanes)
                capped = soft_cap(score, self.spec.logit_softcap, c.lanes)
                store(weights, (row, c.start), c.lanes, capped)

    def hide(self, count, before) -> None:
        """Hide the positions of a block from `count` on, and those before `before`."""
        lanes, weights = self.lanes, self.split.weights
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(self.split.block, lanes):
                position = T.ramp(c.start, 1, lanes)
                seen = position < broadcast(count, lanes)
                if before is not None:
                    seen = T.And(seen, position >= broadcast(before, lanes))
                score = load(weights, (row, c.start), lanes)
                hidden = T.Select(seen, score, constant(HIDDEN, lanes))
                store(weights, (row, c.start), lanes, hidden)
