# SPDX-License-Identifier: Apache-2.0
"""Rows of codes of quantized K and V, and their scales, as products with codes take them.

Codes of "int5" are those plus 16 here, and get a byte each; those of "int4" plus 8. Where
instructions take unsigned bytes, those of "int8" are those plus 128, and the codes of "int4" in the
upper bits of a byte stay there, 16 times too large, and so are their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ...codec import Codec
from ...spec import KernelSpec
from ..isa.simd import F32, broadcast, constant, load, shuffle, store, store_row, temp
from .kv_blocks import BLOCK, KvBlocks


class CodeRows:
    """The rows of codes of K or of V.

    Parameters
    ----------
    spec : KernelSpec
    codec : Codec
    is_signed : bool
        Whether codes are multiplied as signed numbers.

    Attributes
    ----------
    code_bytes : int
        Bytes of a row of codes; those of "int5" are unpacked.
    halves : range
        Halves of the columns that share bytes, or the only one.
    piece, num_pieces : int
        Dwords that belong to one group of scales, in each half; and how many such there are.
    zero : int
        The code of zero.
    """

    def __init__(self, spec: KernelSpec, codec: Codec, *, is_signed: bool = True):
        self.codec, self.is_signed, self.width = codec, is_signed, spec.qk_head_dim
        has_halves = codec.is_packed and not codec.has_high_bits
        self.halves = range(2 if has_halves else 1)
        self.code_bytes = self.width // len(self.halves)
        self.groups = codec.groups(spec.qk_head_dim, spec.v_head_dim)
        self.piece = math.gcd(self.code_bytes // 4, *(begin // 4 for begin, _ in self.groups))
        self.num_pieces = self.code_bytes // 4 // self.piece
        self.zero = 0 if is_signed and not codec.is_packed else 1 << (codec.bits - 1)

    def unsigned(self, codes, lanes: int):
        """Dwords of codes, brought to unsigned bytes where these are multiplied."""
        if self.codec.is_packed or self.is_signed:
            return codes
        return T.bitwise_xor(codes, broadcast(T.int32(0x80808080 - (1 << 32)), lanes))

    def half_of(self, codes, half: int, lanes: int):
        """The codes of a half of the columns; `sum_of` undoes the factor that some of them have."""
        if len(self.halves) == 1:
            return codes
        (plane,) = self.codec.planes
        shift = half * plane.num_bits
        if half and self.is_signed:
            data = T.reinterpret(f"uint8x{4 * lanes}", codes)
            data = T.shift_right(data, broadcast(T.uint8(shift), 4 * lanes))
            return T.reinterpret(f"int32x{lanes}", data)
        mask = (plane.mask << shift) * 0x01010101
        return T.bitwise_and(codes, broadcast(T.int32(mask - (mask >> 31 << 32)), lanes))

    def sum_of(self, total, half: int, lanes: int):
        """Return the sum of products with the codes, from that with `half_of` of them.

        Unsigned codes of the second half stay in the high bits: they are 16 times too large.
        """
        if half and not self.is_signed:
            return T.shift_right(total, broadcast(T.int32(4), lanes))
        return total

    def segment(self, piece, half: int):
        """Part of a row of Q that is multiplied with a piece: ``4 * self.piece`` columns."""
        return half * self.num_pieces + piece

    def group_of(self, piece, half: int):
        """The group whose scales a piece has."""
        return self.segment(piece, half) * 4 * self.piece // (self.width // len(self.groups))


@T.meta_class
class CodeScales:
    """The scales of some positions of K, or of a block of V.

    Parameters
    ----------
    spec : KernelSpec
    num_groups : int
        Scales of a row.
    positions : int
        Positions whose scales are gathered at once.
    capacity : int
        Positions whose scales are kept.

    Attributes
    ----------
    values : float32 ``[group, position]``
    """

    def __init__(self, spec: KernelSpec, num_groups: int, positions: int, capacity: int):
        self.spec, self.positions, self.num_groups = spec, positions, num_groups
        self.values = T.alloc_buffer((num_groups, capacity), F32)

    def vector(self, group, position, lanes: int):
        """The scales of a group at `lanes` positions."""
        return load(self.values, (group, position), lanes)

    def gather(self, element: Callable, column) -> None:
        """Gather the scales of `positions` positions, group by group.

        Parameters
        ----------
        element : callable
            ``(position, column)``, as `Tile.k` or `Tile.v`.
        column : int32 expression
            Where the first one's are kept.
        """
        num_groups, run = self.num_groups, min(self.positions, self.spec.page_size)
        for first in range(0, self.positions, run):
            pages, (*row, _) = element(first, 0)
            # Slots of a page are neighbours: their scales are one run of numbers.
            count = run * num_groups
            has_pairs = str(pages.scales.dtype) != F32 and num_groups % 2 == 0
            if self.spec.target.has_word_dot and has_pairs and run >= 4:
                self._gather_pairs(pages, row, column + first, run)
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
                        T.buffer_store(self.values, pages.scale(row, group), at)
                    continue
                order = range(group, count, num_groups)
                value = shuffle([values], order) if num_groups > 1 else values
                store(self.values, (group, column + first), run, value)

    def _gather_pairs(self, pages, row: Sequence, column, run: int) -> None:
        """Gather bfloat16 scales of `run` positions, those of two groups in a dword at once.

        Shuffles of words, which AVX2 has within 128 bits only, take ten times as many instructions.
        """
        num_groups = self.num_groups
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
                store(self.values, (2 * pair + n, column), run, value)

    def hide(self, kv: KvBlocks) -> None:
        """Clear the scales of the positions of a block that a row does not see."""
        for group in range(self.num_groups):
            store_row(
                self.values,
                (group,),
                BLOCK,
                self.spec.target.lanes,
                lambda c, n, group=group: T.Select(
                    kv.sees(c, n), self.vector(group, c, n), constant(0.0, n)
                ),
            )
