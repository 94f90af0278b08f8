# SPDX-License-Identifier: Apache-2.0
"""Sums of V by products of softmax weights with its codes, as words (AVX2).

The weights of a block become integers of 16 bits. Codes are widened to words where they are read,
two rows at a time, so that a dword has a column of both. Codes of 4 bits are unsigned there; what
the 8 that is in each adds is subtracted where sums begin.

Bytes of packed codes that lie side by side share a word until they are multiplied, so a vector of
sums has every second column. Columns of O are in that order until `finish`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ..isa.bytes.words import INT32, LANES, RowWords, dot, in_order, integer
from ..isa.shuffles import next_power_of_two
from ..isa.simd import broadcast, load, shuffle, store, temp
from .code_blocks import CodeScales
from .kv_blocks import BLOCK, KvBlocks
from .row_products import RowProducts

CODES = 2 * LANES  # of a vector of words
WORDS = f"int16x{CODES}"
POSITIONS = 16  # whose dwords are side by side
HALF = POSITIONS // 2  # between the two positions of a dword


class Strip(NamedTuple):
    """Columns of V that are summed at once.

    Parameters
    ----------
    width : int
        Bytes of codes that are read of a row.
    words : tuple of int
        Packed codes: the words of these bytes that are multiplied.
    is_high : bool
        Packed codes: whether they are those in the upper bits of bytes, of the second half of O.
    """

    width: int
    words: tuple[int, ...] = ()
    is_high: bool = False


@T.meta_class
class WordValues(RowProducts):
    """As `RowProducts`, with sums of the codes of V."""

    def _begin_v(self, scales: CodeScales) -> None:
        """Allocate the weights, which take in the scales of V."""
        self.scales, self.v_rows = scales, scales.v_rows
        num_rows, self.num_groups = self.blocking.rows, len(self.v_rows.groups)
        self.weights = RowWords(num_rows * self.num_groups, BLOCK)
        self.weight_offsets = T.alloc_buffer((num_rows * self.num_groups + LANES,), INT32)

    @inline
    def take_v(self, kv: KvBlocks):
        """Take the scales of V of a block of positions."""
        count = T.meta_var(self.scales.positions)
        for i in range((kv.count + count - 1) // count):
            tile = kv.rows.tile(kv.first + i * count, count)
            self.scales.take_scales(tile.v, self.scales.v_scales, i * count)
        if kv.hides_some:
            self.scales.hide(kv)

    @inline
    def add_weighted_v(self, kv: KvBlocks, block):
        """``O = O * rescale + P V`` for a set of rows."""
        num_rows, groups = T.meta_var((self.blocking.rows, self.num_groups))
        first_row = (kv.local_head * self.blocking.row_blocks + block) * self.blocking.rows
        if groups > 1:
            for r in range(num_rows):
                row = block * num_rows + r
                self._set_weights(r * groups, groups, lambda i: (row, i))
        else:
            self._set_weights(0, num_rows, lambda i: (block * num_rows + i, 0))
        for i in range(self.v_rows.code_bytes // self._width):
            self._add_strips(kv, first_row, i)

    def _add_strips(self, kv, first_row, i) -> None:
        """Add the products with `_width` bytes of codes, which share scales."""
        strips = _strips(self._width, self.v_rows.codec.is_packed)
        num_strips = len(strips) * (self.v_rows.code_bytes // self._width)
        num_parts = min(self.scales.positions, 1 << num_strips.bit_length() - 1)
        for n, strip in enumerate(strips):
            part = (i * len(strips) + n) % num_parts
            self._add_columns(kv, first_row, i * self._width, strip, part, num_parts)

    @property
    def _width(self) -> int:
        """Bytes of codes that are read of a row of V at once: 32 packed ones or 16."""
        return 4 * self.v_rows.piece if self.v_rows.codec.is_packed else CODES

    def _set_weights(self, first, count: int, source: Callable) -> None:
        """Set some rows of weights, which are those of the row and the group ``source(i)``."""
        self.weights.set_rows(first, count, lambda i, n: self._scaled_weights(*source(i), n))
        if self.v_rows.codec.is_packed:
            lanes = next_power_of_two(count)
            zero = broadcast(T.int32(-self.v_rows.zero), lanes)
            offsets = self.weights.sums(first, count) * zero
            store(self.weight_offsets, (first,), lanes, offsets, INT32)

    def _scaled_weights(self, row, group, start: int) -> list:
        """Weights of a row times the scales of V: of 8 positions, and of those `HALF` later."""
        found = []
        for first in (start, start + HALF):
            weight = load(self.rows.weights, (row, first), LANES)
            found.append(weight * load(self.scales.v_scales, (group, first), LANES))
        return found

    @inline
    def _add_columns(self, kv, first_row, begin, strip, part, num_parts):
        """Add the products with the columns of a strip, from byte `begin` of the codes on.

        A part of what comes next is prefetched.
        """
        sums = T.alloc_local((2 * self.blocking.rows, LANES), INT32)
        self._begin_columns(sums, begin, strip)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            tile = kv.rows.tile(kv.first + i * POSITIONS, POSITIONS)
            self._prefetch_following(kv, kv.following_first + i * POSITIONS, part, num_parts)
            for t in T.unroll(HALF):
                self._add_pair(sums, tile, t, i * HALF + t, begin, strip)
        self._put_columns(sums, first_row, begin, strip)

    def _prefetch_following(self, kv, following, part, num_parts: int) -> None:
        """Prefetch a part of `POSITIONS` positions that come next."""
        for first in range(0, POSITIONS, self.scales.positions):
            for plane in (V_PLANE, K_PLANE):
                prefetch = self.scales.prefetcher(kv.following, following + first, plane)
                prefetch(part, num_parts)

    def _packed_row(self, r: int, begin, strip: Strip):
        """Row of `weights` of a row, for the group of the columns of a strip."""
        if self.num_groups == 1:
            return r
        column = begin + strip.is_high * self.v_rows.code_bytes
        return r * self.num_groups + column * self.num_groups // self.spec.v_head_dim

    def _begin_columns(self, sums, begin, strip: Strip) -> None:
        for r in range(self.blocking.rows):
            value = integer(0)
            if self.v_rows.codec.is_packed:
                offset = self.weight_offsets[self._packed_row(r, begin, strip)]
                value = broadcast(temp(offset, 1, INT32), LANES)
            for vector in range(2):
                store(sums, (2 * r + vector, 0), LANES, value, INT32)

    def _add_pair(self, sums, tile, t, dword, begin, strip: Strip) -> None:
        """Add the products with positions `t` and ``t + HALF`` of a tile."""
        both = []
        for position in (t, t + HALF):
            pages, (*row, _) = tile.v(position, 0)
            codes = pages.codes[(*row, T.ramp(begin, 1, strip.width))]
            both.append(temp(codes, strip.width, str(pages.codes.dtype)))
        words = _packed_words(both, strip) if strip.words else _words(both)
        for r in range(self.blocking.rows):
            row = self._packed_row(r, begin, strip)
            weight = temp(broadcast(self.weights.words[row, dword], LANES), LANES, INT32)
            for vector, value in enumerate(words):
                at = (2 * r + vector, 0)
                total = load(sums, at, LANES, INT32)
                store(sums, at, LANES, in_order(dot(total, value, weight)), INT32)

    def _put_columns(self, sums, first_row, begin, strip: Strip) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        o = self.rows.o
        for r in range(self.blocking.rows):
            decay = temp(self.rows.softmax.rescale[self.rows.state(first_row + r)])
            scale = temp(self.weights.scale[self._packed_row(r, begin, strip)])
            for vector in range(2):
                value = load(sums, (2 * r + vector, 0), LANES, INT32)
                value = T.cast(value, "float32x8") * broadcast(scale, LANES)
                at = (first_row + r, self._place(begin, strip) + vector * LANES)
                before = load(o, at, LANES) * broadcast(decay, LANES)
                store(o, at, LANES, before + value)

    def _place(self, begin, strip: Strip):
        """Return the column of a row of O at which a strip begins."""
        if strip.words and strip.words[0]:
            begin = begin + 2 * LANES
        return begin + strip.is_high * self.v_rows.code_bytes

    @inline
    def finish(self, num_heads):
        """Put the sums of the local heads into the order of the columns."""
        if self.v_rows.codec.is_packed:
            for row in range(num_heads * self.blocking.padded_rows):
                self._order_packed_columns(row)

    def _order_packed_columns(self, row) -> None:
        o, width = self.rows.o, self._width
        places = {}  # of columns among those of as many bytes
        for strip in _strips(width, True):
            for lane, word in enumerate(strip.words):
                for is_odd in range(2):
                    place = self._place(0, strip) + is_odd * LANES + lane
                    places[2 * word + is_odd] = place % self.v_rows.code_bytes
        for first in range(0, self.spec.v_head_dim, width):
            at = [(row, first + c) for c in range(0, width, LANES)]
            vectors = [temp(load(o, each, LANES), LANES) for each in at]
            for v, each in enumerate(at):
                found = [places[c] for c in range(v * LANES, (v + 1) * LANES)]
                used = sorted({i // LANES for i in found})
                order = [used.index(i // LANES) * LANES + i % LANES for i in found]
                store(o, each, LANES, shuffle([vectors[i] for i in used], order))


def _strips(width: int, is_packed: bool) -> list[Strip]:
    """Cut some bytes of codes of a row into strips."""
    if not is_packed:
        return [Strip(width)]
    # Words that an instruction interleaves: of each 128 bits either half.
    num_parts = width // 16
    sets = [[8 * p + 4 * n + i for p in range(num_parts) for i in range(4)] for n in range(2)]
    words = sets if num_parts == 2 else [sorted(sets[0] + sets[1])]
    return [Strip(width, tuple(each), is_high) for each in words for is_high in (False, True)]


def _words(both: list) -> list:
    """16 codes of 8 bits of two rows as two vectors of words, a column of both in a dword."""
    found = []
    for vector in range(2):
        columns = range(vector * LANES, (vector + 1) * LANES)
        codes = shuffle(both, [x for c in columns for x in (c, CODES + c)])
        words = T.cast(temp(codes, CODES, "int8"), WORDS)
        found.append(temp(T.reinterpret("int32x8", words), LANES, INT32))
    return found


def _packed_words(both: list, strip: Strip) -> list:
    """Codes of 4 bits of two rows: those of the first byte of each word, and of the second."""
    count = strip.width // 2
    rows = [temp(T.reinterpret(f"uint16x{count}", x), count, "uint16") for x in both]
    words = shuffle(rows, [x for word in strip.words for x in (word, count + word)])
    words = temp(words, CODES, "uint16")
    found = []
    for shift in (4, 12) if strip.is_high else (0, 8):
        codes = T.shift_right(words, broadcast(T.uint16(shift), CODES)) if shift else words
        if shift < 12:
            codes = T.bitwise_and(codes, broadcast(T.uint16(15), CODES))
        found.append(temp(T.reinterpret("int32x8", codes), LANES, INT32))
    return found
