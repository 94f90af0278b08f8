# SPDX-License-Identifier: Apache-2.0
"""Sums of V by products of softmax weights with its codes, as words (AVX2).

The weights of a block become integers of 16 bits. Codes are widened to words where they are read,
two rows at a time, so that a dword has a column of both. Codes of 4 bits are unsigned there; what
the 8 that is in each adds is subtracted where sums begin. Those in the upper bits of a byte stay
there, 16 times too large, and so are their sums.

Bytes of packed codes that lie side by side share a word until they are multiplied, so a vector of
sums has every second column. Columns of O are in that order until `finish`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ..shuffles import next_power_of_two
from ..simd import broadcast, load, shuffle, store, temp
from ..words import INT32, LANES, RowWords, both_words, dot_in_order, integer
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
    is_odd : bool
        Packed codes: whether it is the second byte of each word.
    """

    width: int
    words: tuple[int, ...] = ()
    is_odd: bool = False


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
        width = T.meta_var(self._width)
        for i in range(self.v_rows.code_bytes // width):
            self._add_strips(kv, first_row, i * width)

    def _add_strips(self, kv, first_row, begin) -> None:
        """Add the products with the columns of some bytes of codes, which share scales."""
        for strip in _strips(self._width, self.v_rows.codec.is_packed):
            self._add_columns(kv, first_row, begin, strip)

    @property
    def _width(self) -> int:
        """Bytes of codes that are read of a row of V at once: 32 packed ones or 16."""
        return 4 * self.v_rows.piece if self.v_rows.codec.is_packed else CODES

    def _set_weights(self, first, count: int, source: Callable) -> None:
        """Set some rows of weights, which are those of the row and the group ``source(i)``."""
        self.weights.set_rows(first, count, lambda i, n: self._scaled_weights(*source(i), n))
        if self.v_rows.codec.is_packed:
            lanes = next_power_of_two(count)
            zeros = broadcast(T.int32(-self.v_rows.zero), lanes)
            store(
                self.weight_offsets, (first,), lanes, self.weights.sums(first, count) * zeros, INT32
            )

    def _scaled_weights(self, row, group, start: int) -> list:
        """Weights of a row times the scales of V: of 8 positions, and of those `HALF` later."""
        found = []
        for first in (start, start + HALF):
            weight = load(self.rows.weights, (row, first), LANES)
            found.append(weight * load(self.scales.v_scales, (group, first), LANES))
        return found

    @inline
    def _add_columns(self, kv, first_row, begin, strip):
        """Add the products with the columns of a strip, from byte `begin` of the codes on."""
        sums = T.alloc_local((2 * self.blocking.rows, LANES), INT32)
        self._begin_columns(sums, begin)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            tile = kv.rows.tile(kv.first + i * POSITIONS, POSITIONS)
            for t in T.unroll(HALF):
                self._add_pair(sums, tile, t, i * HALF + t, begin, strip)
        self._put_columns(sums, first_row, begin, strip)

    def _packed_row(self, r: int, vector: int, begin):
        """Row of `weights` of a row, for the group of one of the two vectors of a strip."""
        if self.num_groups == 1:
            return r
        column = begin
        if self.v_rows.codec.is_packed:
            column = vector * self.v_rows.code_bytes + begin
        return r * self.num_groups + column * self.num_groups // self.spec.v_head_dim

    def _begin_columns(self, sums, begin) -> None:
        for vector in range(2):
            for r in range(self.blocking.rows):
                value = integer(0)
                if self.v_rows.codec.is_packed:
                    offset = self.weight_offsets[self._packed_row(r, vector, begin)]
                    value = broadcast(temp(offset * (16 if vector else 1), 1, INT32), LANES)
                store(sums, (vector * self.blocking.rows + r, 0), LANES, value, INT32)

    def _add_pair(self, sums, tile, t, dword, begin, strip: Strip) -> None:
        """Add the products with positions `t` and ``t + HALF`` of a tile."""
        both = []
        for position in (t, t + HALF):
            pages, (*row, _) = tile.v(position, 0)
            dtype = str(pages.codes.dtype)
            both.append(
                temp(pages.codes[(*row, T.ramp(begin, 1, strip.width))], strip.width, dtype)
            )
        words = _packed_words(both, strip) if strip.words else _words(both)
        for vector, value in enumerate(words):
            for r in range(self.blocking.rows):
                row = self._packed_row(r, vector, begin)
                weight = broadcast(self.weights.words[row, dword], LANES)
                at = (vector * self.blocking.rows + r, 0)
                total = load(sums, at, LANES, INT32)
                store(sums, at, LANES, dot_in_order(total, value, weight), INT32)

    def _put_columns(self, sums, first_row, begin, strip: Strip) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        o, is_packed = self.rows.o, self.v_rows.codec.is_packed
        for r in range(self.blocking.rows):
            decay = temp(self.rows.softmax.rescale[self.rows.state(first_row + r)])
            for vector in range(2):
                scale = self.weights.scale[self._packed_row(r, vector, begin)]
                if is_packed and vector:
                    scale = scale * T.float32(1 / 16)
                scale = broadcast(temp(scale), LANES)
                value = load(sums, (vector * self.blocking.rows + r, 0), LANES, INT32)
                value = T.cast(value, "float32x8") * scale
                at = (first_row + r, self._place(begin, strip, vector))
                before = load(o, at, LANES) * broadcast(decay, LANES)
                store(o, at, LANES, before + value)

    def _place(self, begin, strip: Strip, vector: int):
        """Where one of the two vectors of a strip is in a row of O."""
        if not strip.words:
            return begin + vector * LANES
        index = 2 * (strip.words[0] != 0) + strip.is_odd
        return vector * self.v_rows.code_bytes + begin + index * LANES

    @inline
    def finish(self, num_heads):
        """Put the sums of the local heads into the order of the columns."""
        if self.v_rows.codec.is_packed:
            for row in range(num_heads * self.blocking.padded_rows):
                self._order_packed_columns(row)

    def _order_packed_columns(self, row) -> None:
        o, width = self.rows.o, self._width
        places = {}  # of columns among those of as many bytes
        for n, strip in enumerate(_strips(width, True)):
            for lane, word in enumerate(strip.words):
                places[2 * word + strip.is_odd] = n * LANES + lane
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
    return [Strip(width, tuple(each), is_odd) for each in words for is_odd in (False, True)]


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
    """Codes of 4 bits of two rows: those in the lower bits of bytes, and those in the upper."""
    count = strip.width // 2
    rows = [temp(T.reinterpret(f"int16x{count}", x), count, "int16") for x in both]
    words = shuffle(rows, [x for word in strip.words for x in (word, count + word)])
    words = temp(words, CODES, "int16")
    if strip.is_odd:
        words = T.reinterpret(f"uint16x{CODES}", words)
        words = temp(T.shift_right(words, broadcast(T.uint16(8), CODES)), CODES, "uint16")
    dwords = temp(T.reinterpret("int32x8", words), LANES, INT32)
    return [
        temp(T.bitwise_and(dwords, both_words(mask)), LANES, INT32) for mask in (0x000F, 0x00F0)
    ]
