# SPDX-License-Identifier: Apache-2.0
"""Blocks of quantized K and V brought into the order of byte dot products; see `cpu.vnni`.

Codes are unsigned here: those of "int8" plus 128, those of "int5" plus 16, those of "int4" plus 8;
of these last, the ones in the upper bits of a byte stay there, 16 times too large, and so are their
sums. Codes of "int5" get a byte each. A dword of a block of K
has four columns of one position, and a vector has the same columns of 16 positions. A dword of a
block of V has one column of four positions, and a vector has 16 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.script import tirx as T

from ...codec import Codec
from ...layout import K_PLANE, V_PLANE
from ...spec import KernelSpec
from ..codes import load_unpacked
from ..simd import F32, INTO_L1, constant, load, prefetch, shuffle, store, store_row, temp
from ..vnni import INT32, LANES, integer, interleave_bytes, transpose_dwords
from .kv_blocks import BLOCK, KvBlocks

POSITIONS = 16  # of a block of K that are transposed at once
QUAD = 4  # positions of a dword of V
LINE = 64  # bytes


def has_code_blocks(spec: KernelSpec) -> bool:
    """Whether decode multiplies the codes of a spec themselves."""
    codec, target = spec.codec, spec.target
    if codec is None or not target.has_vnni:
        return False
    width = spec.qk_head_dim
    return width <= 256 and all(
        each.is_integer and CodeRows(spec, each).code_bytes % 16 == 0 for each in (codec.k, codec.v)
    )


class CodeRows:
    """How the rows of K or of V are taken apart.

    Parameters
    ----------
    spec : KernelSpec
    codec : Codec
    """

    def __init__(self, spec: KernelSpec, codec: Codec):
        self.codec = codec
        self.width = spec.qk_head_dim
        self.row_bytes = codec.row_bytes(spec.qk_head_dim)
        self.has_halves = codec.is_packed and not codec.has_bit_plane
        self.code_bytes = self.width // 2 if self.has_halves else self.width  # in a block
        self.groups = codec.groups(spec.qk_head_dim, spec.v_head_dim)
        self.halves = range(2 if self.has_halves else 1)  # a half of the columns each
        # Dwords that belong to one group, in each half.
        self.piece = math.gcd(self.code_bytes // 4, *(begin // 4 for begin, _ in self.groups))
        self.num_pieces = self.code_bytes // 4 // self.piece
        self.zero = 1 << (codec.bits - 1)  # the code of zero

    def half_of(self, codes, half: int):
        """The codes of a half of the columns; those of the upper bits are 16 times too large."""
        if len(self.halves) == 1:
            return codes
        mask = 0xF0F0F0F0 - (1 << 32) if half else 0x0F0F0F0F
        return T.bitwise_and(codes, integer(mask))

    def segment(self, piece, half: int):
        """Part of a row of Q that is multiplied with a piece: ``4 * self.piece`` columns."""
        return half * self.num_pieces + piece

    def group_of(self, piece, half: int):
        """The group whose scales a piece has."""
        return self.segment(piece, half) * 4 * self.piece // (self.width // len(self.groups))


@T.meta_class
class CodeBlocks:
    """The block of K, and that of V, that a task works at.

    Attributes
    ----------
    k : int32 ``[vector, position]``: vectors of 16 positions for the dwords of their rows of codes
    k_scales : float32 ``[group, POSITIONS]``
    v : int32 ``[quad, vector, column]``
    v_scales : float32 ``[group, BLOCK]``
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.k_rows, self.v_rows = CodeRows(spec, spec.codec.k), CodeRows(spec, spec.codec.v)
        self.k = T.alloc_buffer((self.k_rows.code_bytes // 4, LANES), INT32)
        self.k_scales = T.alloc_buffer((len(self.k_rows.groups), POSITIONS), F32)
        self.v = T.alloc_buffer((BLOCK // QUAD, spec.v_head_dim // LANES, LANES), INT32)
        self.v_scales = T.alloc_buffer((len(self.v_rows.groups), BLOCK), F32)

    # --- codes ----------------------------------------------------------------------------------

    def k_vectors(self, dword, halves) -> list:
        """Some halves of the unsigned codes of a dword of all positions; see `half_of`."""
        codes = temp(load(self.k, (dword, 0), LANES, INT32), LANES, INT32)
        return [temp(self.k_rows.half_of(codes, half), LANES, INT32) for half in halves]

    @staticmethod
    def sum_of(total, half: int):
        """What a sum of products with `half_of` would be if all codes were themselves."""
        return T.shift_right(total, integer(4)) if half else total

    def take_k(self, rows, position) -> None:
        """Take `POSITIONS` positions from `position` on, and their scales."""
        tile = rows.tile(position, POSITIONS)
        for begin in range(0, self.k_rows.code_bytes, LINE):
            num_dwords = min(LINE, self.k_rows.code_bytes - begin) // 4
            lines = [self._dwords(tile.k(t, 0), begin, num_dwords) for t in range(POSITIONS)]
            for i, vector in enumerate(transpose_dwords(lines)[:num_dwords]):
                if not self.k_rows.codec.is_packed:
                    vector = self._unsigned(vector)
                store(self.k, (begin // 4 + i, 0), LANES, vector, INT32)
        self._take_scales(tile.k, self.k_scales, 0)

    def take_v(self, rows, position, column) -> None:
        """Take `POSITIONS` positions from `position` on, the first of which is `column`."""
        tile = rows.tile(position, POSITIONS)
        for t in range(0, POSITIONS, QUAD):
            quad = column // QUAD + t // QUAD
            for begin in range(0, self.v_rows.code_bytes, LINE):
                num_dwords = min(LINE, self.v_rows.code_bytes - begin) // 4
                lines = [self._dwords(tile.v(t + i, 0), begin, num_dwords) for i in range(QUAD)]
                vectors = interleave_bytes(lines)[: num_dwords * 4 // LANES]
                for i, vector in enumerate(vectors):
                    self._put_v(quad, begin // LANES + i, vector)
        self._take_scales(tile.v, self.v_scales, column)

    def _put_v(self, quad, vector: int, codes) -> None:
        """Keep the codes of some bytes of four rows."""
        if not self.v_rows.codec.is_packed:
            codes = self._unsigned(codes)
        for half in self.v_rows.halves:
            at = (quad, vector + half * (self.v_rows.code_bytes // LANES), 0)
            store(self.v, at, LANES, self.v_rows.half_of(codes, half), INT32)

    @staticmethod
    def _unsigned(codes):
        """Signed bytes plus 128."""
        return T.bitwise_xor(codes, integer(0x80808080 - (1 << 32)))

    @staticmethod
    def _dwords(element, begin: int, num_dwords: int):
        """Bytes of codes of a row; the lanes of a vector that it does not fill repeat them."""
        pages, (*row, _) = element
        if pages.codec.has_bit_plane:
            value = load_unpacked(pages, row, begin, 4 * num_dwords)
        else:
            codes = pages.codes[(*row, T.ramp(begin, 1, 4 * num_dwords))]
            value = T.reinterpret(f"int32x{num_dwords}", codes)
        while num_dwords < LANES:
            value = temp(value, num_dwords, INT32)
            count, num_dwords = num_dwords, min(LANES, 2 * num_dwords)
            value = shuffle([value, value], [i % count for i in range(num_dwords)])
        return temp(value, LANES, INT32)

    # --- scales ---------------------------------------------------------------------------------

    def _take_scales(self, element, sink, column) -> None:
        """Gather the scales of `POSITIONS` positions, group by group."""
        num_groups, page_size = len(element(0, 0)[0].groups), self.spec.page_size
        run = min(POSITIONS, page_size)
        for first in range(0, POSITIONS, run):
            pages, (*row, _) = element(first, 0)
            # Slots of a page are neighbours: their scales are one run of numbers.
            count = run * num_groups
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

    # --- prefetches -----------------------------------------------------------------------------

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
        """What asks for the codes of `POSITIONS` positions of K or V, little by little.

        Asking for much at once would wait for memory. A step has few enough lines for L1.

        Returns
        -------
        callable
            ``(part, num_parts)``, the first of which may be an expression.
        """
        is_one_run = rows.run >= POSITIONS
        whole = rows.tile(position, POSITIONS) if is_one_run else None
        num_bytes = {K_PLANE: self.k_rows, V_PLANE: self.v_rows}[plane].row_bytes

        def prefetch_part(part, num_parts: int) -> None:
            count = POSITIONS // num_parts
            tile, first = whole, part * count
            if not is_one_run:
                tile, first = rows.tile(position + part * count, count), 0
            element = {K_PLANE: tile.k, V_PLANE: tile.v}[plane]
            run = count if is_one_run else min(count, rows.run)
            for t in range(0, count, run):
                pages, (*row, _) = element(first + t, 0)
                for byte in range(0, run * num_bytes, LINE):
                    prefetch(pages.codes, (*row, byte), INTO_L1)

        return prefetch_part

    def hide(self, kv: KvBlocks) -> None:
        """Clear the scales of V of the positions that a row does not see."""
        for group in range(len(self.v_rows.groups)):
            store_row(
                self.v_scales,
                (group,),
                BLOCK,
                LANES,
                lambda c, n, group=group: T.Select(
                    kv.sees(c, n), load(self.v_scales, (group, c), n), constant(0.0, n)
                ),
            )
