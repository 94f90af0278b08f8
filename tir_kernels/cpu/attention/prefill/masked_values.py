# SPDX-License-Identifier: Apache-2.0
"""The product with V where rows of a tile see different positions, and some of V is no number.

A hidden position has a weight of 0, which hides numbers only: 0 times NaN, or times infinity, is
NaN. Tiles of which all rows see every position need no care. The others, those of a causal diagonal
and at the ends of a window, are looked through once, and in the rare case that one holds NaN or
infinity its rows are summed one by one, over what each of them sees.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...columns import for_columns
from ...matmul_tile import UNROLL
from ...simd import Register, add, broadcast, constant, load, reduce_lanes, store, temp


class MaskedValues:
    """The rare case, for one tile.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    v : columns.Panels
        The packed tile of V.
    vectors : int
        Vectors of columns that are summed at once.
    """

    def __init__(self, spec, ops, v, vectors: int):
        self.width, self.ops, self.v, self.vectors = spec.v_head_dim, ops, v, vectors
        self.lanes = spec.target.lanes
        self._is_special = Register(1, "int32", T.int32(0))

    @property
    def is_special(self):
        """Whether the tile holds NaN or infinity, if `look` asked for it."""
        return self._is_special.get() != 0

    def look(self, is_masked, num_positions) -> None:
        """Look through the first positions of the tile, if some rows do not see all of them."""
        self._is_special.set(0)
        with T.If(is_masked), T.Then():
            found = Register(1, init=T.float32(0))
            # Loaded, because a product with a constant 0 would be folded.
            zero = Register(self.lanes, self.ops.dtype, self._zeros(self.lanes))

            def columns(start, parts):
                totals = [
                    Register(c.lanes, init=constant(0.0, c.lanes))
                    for _ in range(UNROLL)
                    for c in parts
                ]
                with T.serial(num_positions // (self.ops.numbers * UNROLL)) as step:
                    each = iter(totals)
                    for u in range(UNROLL):
                        for c in parts:
                            at = self.v.at(step * UNROLL + u, start + c.start)
                            value = load(*at, c.lanes, self.ops.dtype)
                            lanes = c.lanes
                            factor = zero.get() if lanes == self.lanes else self._zeros(lanes)
                            self.ops.multiply_add(next(each), value, factor)
                for total in totals:
                    found.set(found.get() + reduce_lanes(total.get(), total.lanes, add))

            for_columns(self.width, self.lanes, self.vectors, columns)
            self._is_special.set(T.if_then_else(found.get() == T.float32(0), 0, 1))

    def _zeros(self, lanes: int):
        return broadcast(T.cast(0, self.ops.dtype), lanes)

    def add_row(self, o, row, decay, num_elements: int, weight_of: Callable, sees: Callable):
        """Decay a row of `o` and add the weighted positions that it sees.

        Parameters
        ----------
        weight_of : ``element -> scalar element`` of the weights, loaded from a buffer.
        sees : ``position -> bool``
        """
        ops = self.ops

        def columns(start, parts):
            at = [(row, start + c.start) for c in parts]
            totals = [
                Register(c.lanes, init=load(o, i, c.lanes) * broadcast(decay, c.lanes))
                for i, c in zip(at, parts, strict=True)
            ]
            with T.serial(num_elements) as k:
                weight = temp(weight_of(k), 1, ops.dtype)
                for total, c in zip(totals, parts, strict=True):
                    value = load(*self.v.at(k, start + c.start), c.lanes, ops.dtype)
                    value = ops.select(value, lambda n: sees(k * ops.numbers + n), c.lanes)
                    value = temp(value, c.lanes, ops.dtype)
                    ops.multiply_add(total, broadcast(weight, c.lanes), value)
            for total, i in zip(totals, at, strict=True):
                store(o, i, total.lanes, total.get())

        for_columns(self.width, self.lanes, self.vectors, columns)
