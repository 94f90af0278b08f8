# SPDX-License-Identifier: Apache-2.0
"""The work items of a block, found on the device from the starts of the sequences."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from ..emit import I32, I64, WARP, Variable, index_temp, temp
from ..warp import shuffle_from, shuffle_up, shuffle_xor


def sum_over(count, of: Callable, lane):
    """The sum of counts ``of(i)`` for ``i < count``, an int64; every warp finds it for itself."""
    total = Variable(T.int64(0), I64)
    with T.serial(T.ceildiv(count, WARP)) as turn:
        i = index_temp(turn * WARP + lane)
        with T.If(i < count), T.Then():
            total.set(total.get() + of(i))
    for mask in (1, 2, 4, 8, 16):
        total.set(total.get() + shuffle_xor(total.get(), mask))
    return total.get()


class WorkItem:
    """The work item with a given number, when every sequence has some.

    Every warp finds it for itself, 32 sequences at a time.

    Parameters
    ----------
    number : expression of type `dtype`
        The same in all threads of a block.
    num_sequences : int32 expression
    items_of : callable
        Sequence -> number of its work items, of the type of `number`.
    lane : int32 expression
    dtype : {"int32", "int64"}

    Attributes
    ----------
    sequence : int32 expression
        Or -1, when there are fewer items.
    index : expression of the type of `number`
        Which one of the sequence.
    count : expression of the type of `number`
        How many the sequence has.
    """

    def __init__(self, number, num_sequences, items_of: Callable, lane, dtype: str = I32):
        zero = tirx.const(0, dtype)
        sequence, base = Variable(T.int32(-1)), Variable(T.int32(0))
        index, count, before = (Variable(zero, dtype) for _ in range(3))
        with T.While(T.And(base.get() < num_sequences, sequence.get() < 0)):
            mine = index_temp(base.get() + lane)
            items = Variable(zero, dtype)
            with T.If(mine < num_sequences), T.Then():
                items.set(items_of(mine))
            until = Variable(items.get(), dtype)  # items of the sequences up to the lane's
            for distance in (1, 2, 4, 8, 16):
                other = temp(shuffle_up(until.get(), distance), 1, dtype)
                with T.If(lane >= distance), T.Then():
                    until.set(until.get() + other)
            total = temp(shuffle_from(until.get(), WARP - 1), 1, dtype)
            with T.If(number < before.get() + total), T.Then():
                passed = Variable(T.cast(before.get() + until.get() <= number, I32))
                for mask in (1, 2, 4, 8, 16):
                    passed.set(passed.get() + shuffle_xor(passed.get(), mask))
                owner = index_temp(passed.get())
                sequence.set(base.get() + owner)
                count.set(shuffle_from(items.get(), owner))
                index.set(number - before.get() - shuffle_from(until.get(), owner) + count.get())
            before.set(before.get() + total)
            base.set(base.get() + WARP)
        self.sequence, self.index, self.count = sequence.get(), index.get(), count.get()
