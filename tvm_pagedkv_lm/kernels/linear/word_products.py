# SPDX-License-Identifier: Apache-2.0
"""Products of quantized weights with rows of activations as integers of 16 bits (AVX2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bytes.words import INT32, LANES, both_words, dot
from tir_kernels.cpu.isa.simd import Register, broadcast, load, store, temp, vector_type

from ...formats.weight_formats import GROUP
from . import mxfp4_kernels as mxfp4
from .code_matrix import CodeMatrix
from .code_panel import IntegerPanel, StoredSums

_DWORDS = GROUP // 2  # of a group of words


@T.meta_class
class WordProducts(IntegerPanel):
    """Dot products of words; a panel has the codes of a group, a word each.

    A dword of packed weights has the bytes of four input features, so its words are those of the
    first and the third one in the low bytes, and of the other two in the high bytes.
    `row_codes.encode_rows` stores words of x in the same order. Parameters are those of
    `ByteProducts`.
    """

    num_groups = 1  # of a panel
    few_rows = (1, 2)  # for which there is `add_few`

    def __init__(self, matrix: CodeMatrix, weight, x, max_rows: int, row_of: Callable):
        super().__init__(matrix, weight, x, row_of)
        self.panel = T.alloc_buffer((_DWORDS, matrix.width), INT32)

    def begin_part(self, block, group, count) -> None:
        """Take the codes of a group."""
        for at, v in product(range(self._packed_dwords()), range(self.matrix.vectors)):
            for dword, shift, words in self._words(block, group, at, v):
                if shift:
                    words = T.shift_right(words, self.integer(shift))
                store(self.panel, (dword, v * LANES), LANES, words, INT32)

    def _packed_dwords(self) -> int:
        """Dwords of packed codes of an output feature and a group."""
        return GROUP * self.matrix.format.bits // 32

    def _words(self, block, group, at: int, v: int) -> list:
        """The codes in a vector of packed dwords.

        Returns
        -------
        list of (dword, shift, words)
            The dword of x whose words `words` are multiplied with, and by how many bits these are
            shifted to the left.
        """
        packed = self.dwords(block, group, at * self.matrix.width + v * LANES)
        packed = temp(packed, LANES, INT32)
        high = 2 * at + _DWORDS // 2  # of x, for what is in the high halves of bytes
        if self.matrix.format.bits == 8:
            found = self._bytes(2 * at, packed)
        elif self.matrix.format.is_mxfp4:
            nibbles = self.integer(0x0F0F0F0F)
            halves = [packed, T.shift_right(packed, self.integer(4))]
            halves = [mxfp4.unsigned_codes(T.bitwise_and(x, nibbles), LANES) for x in halves]
            halves = [temp(x, LANES, INT32) for x in halves]
            found = self._bytes(2 * at, halves[0]) + self._bytes(high, halves[1])
        else:
            found = [
                (2 * at, 0, T.bitwise_and(packed, both_words(0xF))),
                (high, 4, T.bitwise_and(packed, both_words(0xF0))),
                (2 * at + 1, 8, T.bitwise_and(packed, both_words(0xF00))),
                (high + 1, 0, _right(packed, 12)),
            ]
        return [(dword, shift, temp(x, LANES, INT32)) for dword, shift, x in found]

    def _bytes(self, dword: int, packed) -> list:
        """As `_words`, for codes of a byte each."""
        low = T.bitwise_and(packed, both_words(0xFF))
        return [(dword, 0, low), (dword + 1, 0, _right(packed, 8))]

    def add_tile(self, sums, row, num_rows: int, block, group) -> None:
        """Add the products with `num_rows` rows to their sums."""
        tile = [(r, v) for r in range(num_rows) for v in range(self.matrix.vectors)]
        rows = [temp(self.row_of(row + r), 1, "int64") for r in range(num_rows)]
        totals = {(r, v): Register(LANES, INT32, self._first(rows[r], group)) for r, v in tile}
        with T.serial(_DWORDS) as dword:
            words = [
                temp(load(self.panel, (dword, v * LANES), LANES, INT32), LANES, INT32)
                for v in range(self.matrix.vectors)
            ]
            for r in range(num_rows):
                value = broadcast(self.x_dword(rows[r], group, dword * 4), LANES)
                for v, word in enumerate(words):
                    totals[r, v].set(dot(totals[r, v].get(), word, value))
        totals = {at: total.get() for at, total in totals.items()}
        stored = {(r, v): StoredSums(sums, (row + r, v * LANES), LANES) for r, v in tile}
        self.add_totals(stored, rows, (block, group), totals)

    def _first(self, row, group):
        """What sums of products of words begin with."""
        if not self.matrix.format.zero:
            return self.integer(0)
        return broadcast(self.offset(row, group), LANES)

    def add_few(self, sums: dict, rows: list, block, group) -> None:
        """Add the products with one or two rows of x to registers ``sums[row, vector]``.

        Codes are multiplied where they are in a word: sums of products that are shifted to the left
        are shifted back at the end. They fit 32 bits: of codes of 4 bits that are shifted by 8,
        a word of a group has eight at most.
        """
        vectors = range(self.matrix.vectors)
        totals: dict = {}  # by shift, row and vector

        def add(at: tuple, words, x) -> None:
            if at not in totals:
                shift, r, _ = at
                first = self.integer(0) if shift else self._first(rows[r], group)
                totals[at] = Register(LANES, INT32, first)
            totals[at].set(dot(totals[at].get(), words, x))

        for at in range(self._packed_dwords()):
            for words in zip(*(self._words(block, group, at, v) for v in vectors), strict=True):
                dword, shift, _ = words[0]
                for r, row in enumerate(rows):
                    x = temp(broadcast(self.x_dword(row, group, dword * 4), LANES), LANES, INT32)
                    for v in vectors:
                        add((shift, r, v), words[v][2], x)
        found: dict = {}
        for (shift, r, v), total in totals.items():
            value = total.get()
            if shift:
                value = T.shift_right(value, self.integer(shift))
            found[r, v] = found[r, v] + value if (r, v) in found else value
        self.add_totals(sums, rows, (block, group), found)


def _right(dwords, bits: int):
    """Shift both words of every lane to the right; zeros follow."""
    words = T.reinterpret(vector_type("uint16", 2 * LANES), dwords)
    words = T.shift_right(words, broadcast(T.uint16(bits), 2 * LANES))
    return T.reinterpret(vector_type(INT32, LANES), words)
