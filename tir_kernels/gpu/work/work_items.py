# SPDX-License-Identifier: Apache-2.0
"""The items of a call, sequences or shared segments, and the search for the item of some work."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from ...script import inline
from ..registers import I32, WARP


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a call.

    Parameters
    ----------
    count : int32 expression
    row_indptr, kv_indptr : int32 Buffers
        Where the rows of an item begin, and its pages or rows of ragged K and V.
    kv_len_of : callable
        Index in these arrays -> the item's number of positions.
    offset : int32 expression
        Index of the first item of the call in these arrays.
    row_ids : int32 Buffer, optional
        The rows of Q of all items; None: they follow each other.
    are_all_visited : bool
        Whether blocks visit items without positions, whose rows see nothing but are written, too.
    """

    count: object
    row_indptr: object
    kv_indptr: object
    kv_len_of: Callable
    offset: object = 0
    row_ids: object = None
    are_all_visited: bool = True

    def first_row(self, i):
        """Return where the rows of item i begin."""
        return self.row_indptr[self.offset + i]

    def num_rows(self, i):
        """Return the number of rows of item i."""
        return self.row_indptr[self.offset + i + 1] - self.row_indptr[self.offset + i]

    def kv_len(self, i):
        """Return the number of positions of item i."""
        return self.kv_len_of(self.offset + i)


@T.meta_class
class ItemSearch:
    """Finds the item of a piece of work; every warp does so for itself, 32 items at a time.

    Parameters
    ----------
    isa : Isa
    dtype : str
        Of counts of pieces.

    Attributes
    ----------
    item : int32
        Or -1, when there are fewer pieces.
    index, count : of type `dtype`
        Which piece of the item it is, and how many the item has.
    """

    def __init__(self, isa, dtype: str):
        self.isa = isa
        self.zero = tirx.const(0, dtype)
        self.item, self.index = T.local_scalar(I32), T.local_scalar(dtype)
        self.count = T.local_scalar(dtype)

    @inline
    def find(self, number, num_items, count_of: Callable, lane):
        """Find the piece with a number, if each item has ``count_of(item)`` pieces."""
        self.item = -1
        self.index = self.zero
        self.count = self.zero
        base = T.int32(0)
        before = self.zero
        while T.And(base < num_items, self.item < 0):
            own = self.zero
            if base + lane < num_items:
                own = count_of(base + lane)
            until = own  # pieces of the items up to the lane's
            for i in T.unroll(5):
                other = self.isa.shuffle_up(until, T.shift_left(1, i))
                if lane >= T.shift_left(1, i):
                    until += other
            total = self.isa.shuffle_from(until, WARP - 1)
            if number < before + total:
                is_passed = T.meta_var(T.cast(before + until <= number, I32))
                owner = self.isa.over_lanes(is_passed, operator.add)
                self.item = base + owner
                self.count = self.isa.shuffle_from(own, owner)
                self.index = number - before - self.isa.shuffle_from(until, owner) + self.count
            before += total
            base += WARP
