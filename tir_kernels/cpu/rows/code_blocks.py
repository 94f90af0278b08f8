# SPDX-License-Identifier: Apache-2.0
"""Blocks of quantized K and V brought into the order of byte dot products; see `cpu.byte_dots`.

Codes of "int5" are those plus 16 here, and get a byte each; those of "int4" plus 8. Where
instructions take unsigned bytes, those of "int8" are those plus 128, and the codes of "int4" in the
upper bits of a byte stay there, 16 times too large, and so are their sums. A dword of a block of K
has four columns of one position, and a vector has the same columns of a position in each lane. A
dword of a block of V has one column of four positions, and a vector has a column in each lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ...codec import Codec
from ...layout import K_PLANE, V_PLANE
from ...spec import KernelSpec
from ..isa.bytes.byte_dots import byte_dots
from ..isa.bytes.byte_shuffles import INT32, interleave_bytes, transpose_dwords
from ..isa.simd import (
    F32,
    INTO_L1,
    INTO_L2,
    broadcast,
    constant,
    load,
    prefetch,
    shuffle,
    store,
    store_row,
    temp,
)
from ..pages.codes import load_unpacked
from .kv_blocks import BLOCK, KvBlocks

QUAD = 4  # positions of a dword of V
LINE = 64  # bytes


def has_code_blocks(spec: KernelSpec) -> bool:
    """Whether decode multiplies the codes of a spec themselves."""
    codec, target = spec.codec, spec.target
    if codec is None or byte_dots(target) is None:
        return False
    width = spec.qk_head_dim
    return width <= 256 and all(
        each.is_integer and CodeRows(spec, each).code_bytes % 16 == 0 for each in (codec.k, codec.v)
    )


class CodeRows:
    """The rows of codes of K or of V, and how they become blocks.

    Parameters
    ----------
    spec : KernelSpec
    codec : Codec
    dots : byte dot products, optional
        What multiplies them, if not those of the target.
    """

    def __init__(self, spec: KernelSpec, codec: Codec, dots=None):
        self.codec = codec
        self.dots = dots = dots or byte_dots(spec.target)
        self.width = spec.qk_head_dim
        self.row_bytes = codec.row_bytes(spec.qk_head_dim)
        self.has_halves = codec.is_packed and not codec.has_bit_plane
        self.code_bytes = self.width // 2 if self.has_halves else self.width  # in a block
        self.groups = codec.groups(spec.qk_head_dim, spec.v_head_dim)
        self.halves = range(2 if self.has_halves else 1)  # a half of the columns each
        # Dwords that belong to one group, in each half.
        self.piece = math.gcd(self.code_bytes // 4, *(begin // 4 for begin, _ in self.groups))
        self.num_pieces = self.code_bytes // 4 // self.piece
        # The code of zero.
        is_signed = dots is None or dots.is_signed  # words are
        self.zero = 0 if is_signed and not codec.is_packed else 1 << (codec.bits - 1)

    def half_of(self, codes, half: int):
        """The codes of a half of the columns; `sum_of` undoes the factor that some of them have."""
        if len(self.halves) == 1:
            return codes
        if half and self.dots.is_signed:
            num_bytes = 4 * self.dots.lanes
            data = T.reinterpret(f"uint8x{num_bytes}", codes)
            data = T.shift_right(data, broadcast(T.uint8(4), num_bytes))
            return T.reinterpret(f"int32x{self.dots.lanes}", data)
        mask = 0xF0F0F0F0 - (1 << 32) if half else 0x0F0F0F0F
        return T.bitwise_and(codes, broadcast(T.int32(mask), self.dots.lanes))

    def segment(self, piece, half: int):
        """Part of a row of Q that is multiplied with a piece: ``4 * self.piece`` columns."""
        return half * self.num_pieces + piece

    def group_of(self, piece, half: int):
        """The group whose scales a piece has."""
        return self.segment(piece, half) * 4 * self.piece // (self.width // len(self.groups))


@T.meta_class
class CodeScales:
    """The scales of the block of K, and of that of V, that a task works at; and prefetches of both.

    Parameters
    ----------
    spec : KernelSpec
    positions : int
        Those of K that are taken at once.
    dots : byte dot products, optional
        As of `CodeRows`.

    Attributes
    ----------
    k_scales : float32 ``[group, position]``
    v_scales : float32 ``[group, BLOCK]``
    """

    def __init__(self, spec: KernelSpec, positions: int, dots=None):
        self.spec, self.positions, self.lanes = spec, positions, spec.target.lanes
        self.k_rows = CodeRows(spec, spec.codec.k, dots)
        self.v_rows = CodeRows(spec, spec.codec.v, dots)
        self.k_scales = T.alloc_buffer((len(self.k_rows.groups), positions), F32)
        self.v_scales = T.alloc_buffer((len(self.v_rows.groups), BLOCK), F32)

    def take_scales(self, element, sink, column) -> None:
        """Gather the scales of `positions` positions, group by group."""
        num_groups, page_size = len(element(0, 0)[0].groups), self.spec.page_size
        run = min(self.positions, page_size)
        for first in range(0, self.positions, run):
            pages, (*row, _) = element(first, 0)
            # Slots of a page are neighbours: their scales are one run of numbers.
            count = run * num_groups
            has_pairs = str(pages.scales.dtype) != F32 and num_groups % 2 == 0
            if self.spec.target.has_word_dot and has_pairs and run >= 4:
                self._take_pairs(pages, row, sink, column + first, run)
                continue
            if run < 4:
                values = None
            elif str(pages.scales.dtype) == F32:
                values = temp(pages.scales[(*row, T.ramp(0, 1, count))], count)
            else:
                words = T.cast(pages.scales[(*row, T.ramp(0, 1, count))], f"uint32x{count}")
                bits = T.shift_left(words, T.broadcast(T.uint32(16), count))
                values = temp(T.reinterpret(f"float32x{count}", bits), count)
            for group in range(num_groups):
                if values is None:
                    for i in range(run):
                        pages, (*row, _) = element(first + i, 0)
                        at = [group, column + first + i]
                        T.buffer_store(sink, pages.scale(row, group), at)
                    continue
                order = range(group, count, num_groups)
                value = shuffle([values], order) if num_groups > 1 else values
                store(sink, (group, column + first), run, value)

    def _take_pairs(self, pages, row: Sequence, sink, column, run: int) -> None:
        """Gather bfloat16 scales of `run` positions, those of two groups in a dword at once.

        Shuffles of words, which AVX2 has within 128 bits only, take ten times as many instructions.
        """
        num_groups = len(pages.groups)
        count = run * num_groups // 2
        words = pages.scales[(*row, T.ramp(0, 1, 2 * count))]
        pairs = temp(T.reinterpret(f"uint32x{count}", words), count, "uint32")
        for pair in range(num_groups // 2):
            dwords = shuffle([pairs], range(pair, count, num_groups // 2))
            dwords = temp(dwords, run, "uint32")
            low = T.shift_left(dwords, broadcast(T.uint32(16), run))
            high = T.bitwise_and(dwords, broadcast(T.uint32(0xFFFF0000), run))
            for n, bits in enumerate((low, high)):
                value = T.reinterpret(f"float32x{run}", bits)
                store(sink, (2 * pair + n, column), run, value)

    def prefetch_scales(self, rows, position, count: int, plane: int) -> None:
        """Ask for the scales of some positions of K or V."""
        tile = rows.tile(position, count)
        element = {K_PLANE: tile.k, V_PLANE: tile.v}[plane]
        for first in range(0, count, min(count, rows.run)):
            pages, (*row, _) = element(first, 0)
            itemsize = 4 if str(pages.scales.dtype) == F32 else 2
            num_scales = min(count, rows.run) * len(pages.groups)
            for scale in range(0, num_scales, LINE // itemsize):
                prefetch(pages.scales, (*row, scale), INTO_L1)

    def prefetcher(self, rows, position, plane: int) -> Callable:
        """Return a function that prefetches the codes of `positions` positions of K or V, in parts.

        Asking for much at once would wait for memory. A step has few enough lines for L1, but CPUs
        with AVX2 alone wait for that, too.

        Returns
        -------
        callable
            ``(part, num_parts)``, the first of which may be an expression.
        """
        locality = INTO_L2 if self.spec.target.has_word_dot else INTO_L1
        is_one_run = rows.run >= self.positions
        whole = rows.tile(position, self.positions) if is_one_run else None
        num_bytes = {K_PLANE: self.k_rows, V_PLANE: self.v_rows}[plane].row_bytes

        def prefetch_part(part, num_parts: int) -> None:
            count = self.positions // num_parts
            tile, first = whole, part * count
            if not is_one_run:
                tile, first = rows.tile(position + part * count, count), 0
            element = {K_PLANE: tile.k, V_PLANE: tile.v}[plane]
            run = count if is_one_run else min(count, rows.run)
            for t in range(0, count, run):
                pages, (*row, _) = element(first + t, 0)
                for byte in range(0, run * num_bytes, LINE):
                    prefetch(pages.codes, (*row, byte), locality)

        return prefetch_part

    def prefetch_with(self, kv: KvBlocks, position, following) -> Callable:
        """Ask for the scales of the block that comes next; return what asks for codes.

        Parameters
        ----------
        kv : KvBlocks
        position, following : int32 expression
            The first of `positions` positions of this block, and of those in the next one.

        Returns
        -------
        callable
            ``(part, num_parts)``, as of `prefetcher`: for the codes of K that come next and soon,
            and of V of these positions.
        """
        for plane in (K_PLANE, V_PLANE):
            self.prefetch_scales(kv.following, following, self.positions, plane)
        each = [
            self.prefetcher(kv.following, following, K_PLANE),
            self.prefetcher(kv.rows, position, V_PLANE),
            self.prefetcher(kv.rows, position + self.positions, K_PLANE),
        ]

        def prefetch_part(part, num_parts: int) -> None:
            for prefetch_own in each:
                prefetch_own(part, num_parts)

        return prefetch_part

    def hide(self, kv: KvBlocks) -> None:
        """Clear the scales of V of the positions that a row does not see."""
        for group in range(len(self.v_rows.groups)):
            store_row(
                self.v_scales,
                (group,),
                BLOCK,
                self.lanes,
                lambda c, n, group=group: T.Select(
                    kv.sees(c, n), load(self.v_scales, (group, c), n), constant(0.0, n)
                ),
            )


@T.meta_class
class KBlocks(CodeScales):
    """The positions of K that a task works at.

    Parameters
    ----------
    spec : KernelSpec
    dots : byte dot products

    Attributes
    ----------
    positions : int
        Those that are transposed at once: one in each lane.
    k : int32 ``[vector, position]``: vectors of positions for the dwords of their rows of codes
    """

    def __init__(self, spec: KernelSpec, dots):
        self.dots = dots
        super().__init__(spec, dots.lanes, dots)
        self.k = T.alloc_buffer((self.k_rows.code_bytes // 4, dots.lanes), INT32)

    def k_vectors(self, dword, halves) -> list:
        """Some halves of the unsigned codes of a dword of all positions; see `half_of`."""
        codes = temp(load(self.k, (dword, 0), self.lanes, INT32), self.lanes, INT32)
        return [temp(self.k_rows.half_of(codes, half), self.lanes, INT32) for half in halves]

    def sum_of(self, total, half: int):
        """Return the sum of products with the codes, from that with `half_of` of them.

        Unsigned codes of the second half stay in the high bits: they are 16 times too large.
        """
        if half and not self.dots.is_signed:
            return T.shift_right(total, broadcast(T.int32(4), self.lanes))
        return total

    def take_k(self, rows, position) -> None:
        """Take `positions` positions from `position` on, and their scales."""
        tile, num_bytes = rows.tile(position, self.positions), 4 * self.lanes
        for begin in range(0, self.k_rows.code_bytes, num_bytes):
            num_dwords = min(num_bytes, self.k_rows.code_bytes - begin) // 4
            lines = [self._dwords(tile.k(t, 0), begin, num_dwords) for t in range(self.positions)]
            for i, vector in enumerate(transpose_dwords(lines)[:num_dwords]):
                vector = self._of_bytes(self.k_rows.codec, vector)
                store(self.k, (begin // 4 + i, 0), self.lanes, vector, INT32)
        self.take_scales(tile.k, self.k_scales, 0)

    def _of_bytes(self, codec: Codec, codes):
        """Codes as they are multiplied, from those of some bytes of rows."""
        if codec.is_packed or self.dots.is_signed:
            return codes
        return T.bitwise_xor(codes, broadcast(T.int32(0x80808080 - (1 << 32)), self.lanes))

    def _dwords(self, element, begin: int, num_dwords: int):
        """Bytes of codes of a row; the lanes of a vector that it does not fill repeat them."""
        pages, (*row, _) = element
        if pages.codec.has_bit_plane:
            value = load_unpacked(pages, row, begin, 4 * num_dwords)
        else:
            codes = pages.codes[(*row, T.ramp(begin, 1, 4 * num_dwords))]
            value = T.reinterpret(f"int32x{num_dwords}", codes)
        while num_dwords < self.lanes:
            value = temp(value, num_dwords, INT32)
            count, num_dwords = num_dwords, min(self.lanes, 2 * num_dwords)
            value = shuffle([value, value], [i % count for i in range(num_dwords)])
        return temp(value, self.lanes, INT32)


@T.meta_class
class CodeBlocks(KBlocks):
    """`KBlocks`, and the block of V that a task works at.

    Attributes
    ----------
    v : int32 ``[quad, vector, column]``
    """

    def __init__(self, spec: KernelSpec):
        super().__init__(spec, byte_dots(spec.target))
        lanes = self.dots.lanes
        self.v = T.alloc_buffer((BLOCK // QUAD, spec.v_head_dim // lanes, lanes), INT32)

    def take_v(self, rows, position, column) -> None:
        """Take `positions` positions from `position` on, the first of which is `column`."""
        tile, num_bytes = rows.tile(position, self.positions), 4 * self.lanes
        for t in range(0, self.positions, QUAD):
            quad = column // QUAD + t // QUAD
            for begin in range(0, self.v_rows.code_bytes, num_bytes):
                num_dwords = min(num_bytes, self.v_rows.code_bytes - begin) // 4
                lines = [self._dwords(tile.v(t + i, 0), begin, num_dwords) for i in range(QUAD)]
                vectors = interleave_bytes(lines, self.lanes)[: num_dwords * 4 // self.lanes]
                for i, vector in enumerate(vectors):
                    self._put_v(quad, begin // self.lanes + i, vector)
        self.take_scales(tile.v, self.v_scales, column)

    def _put_v(self, quad, vector: int, codes) -> None:
        """Keep the codes of some bytes of four rows."""
        codes = self._of_bytes(self.v_rows.codec, codes)
        for half in self.v_rows.halves:
            at = (quad, vector + half * (self.v_rows.code_bytes // self.lanes), 0)
            store(self.v, at, self.lanes, self.v_rows.half_of(codes, half), INT32)
