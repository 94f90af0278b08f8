# SPDX-License-Identifier: Apache-2.0
"""A tile of K and V as rows, of which products take one scalar after another."""

from typing import NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.register_tile import UNROLL, RegisterTile, round_up
from ..isa.matrices.steps import Transposed
from ..isa.operands import ROWS_AT_ONCE, copy_v
from ..isa.shuffles import next_power_of_two
from ..isa.simd import (
    F32,
    add,
    broadcast,
    constant,
    elements_per_line,
    for_chunks,
    load,
    reduce_lanes,
    store,
    temp,
)
from .kv_tile import POSITIONS


def rounded(num_positions):
    """Round up to positions that softmax and the products take in whole steps."""
    return (num_positions + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE


@T.meta_class
class LaneKv:
    """K as ``[position, element]``, and V as ``[position or pair of positions, column]``.

    A latent row of MLA is K, and V with its first columns. Of float32 it is kept once; of pairs,
    those of columns are split into pairs of positions, without shuffles: of each 32 columns the
    even ones lie in a vector and the odd ones in the next.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    rows : PagedRows
        The source of K and V.
    """

    def __init__(self, spec: KernelSpec, ops, rows):
        self.spec, self.ops, self.rows, self.lanes = spec, ops, rows, ops.lanes
        self.depth, self.width = spec.qk_head_dim // ops.values_per_element, spec.v_head_dim
        is_latent = spec.is_latent
        self.is_in_k = is_latent and ops.values_per_element == 1
        # Register tiles take up to 16 columns side by side: of one vector, or they are not split.
        can_split = ops.values_per_element == 2 and self.lanes >= 16
        is_even = self.width % (2 * self.lanes) == 0
        self.is_split = is_latent and can_split and is_even and not ops.product_tile
        self.column_step = 2 if self.is_split else 1  # between the columns of two scalars
        tile = ops.product_tile or RegisterTile
        self.padded_depth = round_up(self.depth, tile.step)  # behind the elements there are zeros
        self.positions_at_once = max(ROWS_AT_ONCE, tile.step * ops.values_per_element)  # of V
        self.k = T.alloc_buffer((POSITIONS, self.padded_depth), ops.dtype)
        # A row of split V is one vector longer, or the rows that a register tile reads one after
        # another would share two sets of the cache.
        padding = self.lanes if self.is_split else 0
        shape = (
            POSITIONS // ops.values_per_element,
            round_up(self.width, tile.column_step) + padding,
        )
        self.v = self.k if self.is_in_k else T.alloc_buffer(shape, ops.dtype)
        self.columns_of_v, self.rows_of_v = Transposed(self.v), _Rows(self.v)
        self.has_non_finite = T.local_scalar("int32")

    @inline
    def begin_task(self):
        """Let the elements behind those of K be zeros."""
        if self.padded_depth > self.depth:
            for row in range(POSITIONS):
                for i in range(self.padded_depth - self.depth):
                    self.k[row, self.depth + i] = T.cast(0, self.ops.dtype)

    def rounded(self, num_positions):
        """Round up to positions of V that the products take in whole steps."""
        return round_up(num_positions, self.positions_at_once)

    @inline
    def pack(self, first, end, rope, k_offset):
        """Take the positions from `first` on, of those before `end`.

        Behind them there are a few more, in whole steps of the products: with zeros for V, and some
        row of K.
        """
        num_positions = rounded(T.min(POSITIONS, end - first))

        if rope.rotates_k:
            for i in range(num_positions):
                source = T.meta_var(self.rows.tile(first + i, 1))
                rope.set_position(k_offset + first + i)
                rope.rotate(lambda column, n: source.load_k(0, column, n))
                for_chunks(self.depth, self.lanes, lambda c, n: self._round(rope.row, i, c, n))
        else:
            for i in range(num_positions // ROWS_AT_ONCE):
                tile = T.meta_var(self.rows.tile(first + i * ROWS_AT_ONCE, ROWS_AT_ONCE))
                row = i * ROWS_AT_ONCE
                for_chunks(self.depth, self.lanes, lambda c, n: self._copy(tile, row, c, n))
        if self.is_in_k or self.is_split:
            num_seen = T.min(POSITIONS, end - first)
            for i in range(num_positions - num_seen):
                for_chunks(
                    self.width // self.ops.values_per_element,
                    self.lanes,
                    lambda c, n: self._clear(num_seen + i, c, n),
                )
            if self.is_split:
                if num_seen < num_positions:
                    for i in range(2):
                        pair = num_positions // 2 - 2 + i
                        for_chunks(
                            self.width // 2, self.lanes, lambda c, n: self._split_again(pair, c)
                        )
        else:
            if self.positions_at_once > ROWS_AT_ONCE:
                num_positions = self.rounded(T.min(POSITIONS, end - first))
            copy_v(self.ops, self.rows, first, self.rows_of_v.at, self.width, num_positions, end)

    def _copy(self, source, row, start: int, lanes: int) -> None:
        """Copy a vector of some rows of K, the first at an even position."""
        words = [
            temp(self.ops.load_k(source, t, start, lanes), lanes, self.ops.dtype)
            for t in range(ROWS_AT_ONCE)
        ]
        for t, value in enumerate(words):
            store(self.k, (row + t, start), lanes, value, self.ops.dtype)
        if self.is_split and start < self.width // 2:
            for t in range(0, ROWS_AT_ONCE, 2):
                self._split((row + t) // 2, start, words[t : t + 2])

    def _round(self, rotated, row, start: int, lanes: int) -> None:
        """Store elements of a rotated row of K."""
        elements = self.ops.load_rotated_q(rotated, start, lanes, T.float32(1))
        store(self.k, (row, start), lanes, elements, self.ops.dtype)

    def _split(self, pair, start: int, words: list) -> None:
        """Store pairs of positions from pairs of columns of two rows."""
        for j, value in enumerate(self.ops.split_words(*words, self.lanes)):
            at = (pair, start * 2 + j * self.lanes)
            store(self.v, at, self.lanes, value, self.ops.dtype)

    def _split_again(self, pair, start: int) -> None:
        words = [self.k[pair * 2 + t, T.ramp(start, 1, self.lanes)] for t in range(2)]
        self._split(pair, start, [temp(w, self.lanes, self.ops.dtype) for w in words])

    def _clear(self, row, start: int, lanes: int) -> None:
        zero = broadcast(T.cast(0, self.ops.dtype), lanes)
        store(self.k, (row, start), lanes, zero, self.ops.dtype)

    @inline
    def find_non_finite(self, begin, end):
        """Find out whether positions ``begin .. end - 1`` of V hold NaN or infinity.

        A hidden position has a weight of 0, which hides numbers only.
        """
        self.has_non_finite = 0
        first = T.max(begin, 0) // self.ops.values_per_element
        last = (
            T.min(end, POSITIONS) + self.ops.values_per_element - 1
        ) // self.ops.values_per_element
        if first < last:
            totals = T.alloc_local((self.lanes,), F32)
            zeros = T.alloc_local((self.lanes,), self.ops.dtype)
            store(totals, (0,), self.lanes, constant(0.0, self.lanes))
            zero = T.meta_var(broadcast(T.cast(0, self.ops.dtype), self.lanes))
            store(zeros, (0,), self.lanes, zero, self.ops.dtype)
            for row in range(first, last):
                for_chunks(
                    self.width,
                    self.lanes,
                    lambda c, n: self._add_times_zero(totals, row, c, n, zeros),
                )
            found = reduce_lanes(load(totals, (0,), self.lanes), self.lanes, add)
            self.has_non_finite = T.if_then_else(found == T.float32(0), 0, 1)

    def _add_times_zero(self, totals, row, start: int, lanes: int, zeros) -> None:
        """Add a vector of V times zeros, which are loaded: a constant 0 would fold the product."""
        v = load(self.v, (row, start), lanes, self.ops.dtype)
        zero = load(zeros, (0,), lanes, self.ops.dtype)
        total = load(totals, (0,), lanes)
        store(totals, (0,), lanes, self.ops.fma(total, v, zero, lanes))

    def column(self, start):
        """The column of scalar `start` of V, a multiple of 8; those after it are a step apart."""
        if not self.is_split:
            return start
        return start // 32 * 32 + start % self.lanes * 2 + start // self.lanes % 2

    # Prefetches are spread over the products: many at once would wait for the memory.

    def prefetcher(self, first, block, product, *, is_v: bool):
        """Return ``(step)``, which prefetches the next tile during a product of a block, or None.

        Every block prefetches for some products, and touches this tile, from position `first` on,
        again for others.
        """
        spec = self.spec
        width, dtype = (self.width, spec.v_dtype) if is_v else (spec.qk_head_dim, spec.k_dtype)
        num_products = (width if is_v else POSITIONS) // block.tile.rows
        depth = POSITIONS // self.ops.values_per_element if is_v else self.depth
        # The positions of one product lie side by side in a page.
        count = next_power_of_two(-(-POSITIONS // num_products))
        if count > min(POSITIONS, spec.page_size) or (is_v and spec.is_latent):
            return None
        per_line = elements_per_line(dtype)
        per_step = -(-count * width // (per_line * (depth // UNROLL)))
        is_ahead = T.if_then_else(product % block.count == block.index, POSITIONS, 0)
        position = T.min(product * count, POSITIONS - count)
        tile = self.rows.tile(first + is_ahead + position, count)
        ask = tile.prefetch_v if is_v else tile.prefetch_k

        def ask_in_step(step) -> None:
            for i in range(per_step):
                ask(0, (step * per_step + i) * per_line)

        return ask_in_step


class _Rows(NamedTuple):
    """A matrix as it lies in a buffer, with the method of `Panels`."""

    buffer: object

    def at(self, row, column) -> tuple:
        return self.buffer, (row, column)
