# SPDX-License-Identifier: Apache-2.0
"""The pipeline of quantized K and V: codes and scales are copied, and widened when they are there.

The stages hold codes, so as many bytes are in flight as pages have. A tile that has arrived is
widened once for all warps that multiply it: to numbers of the type of Q, and one scale for each row
of K and V. Where the columns of a row have several scales, its numbers are multiplied by these
relative to the largest one.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ..elements import pack, unpack
from ..emit import F32, U32, Registers, index_temp, ptx
from ..scalars import fused_multiply_add, temp
from .code_tiling import WORD_BYTES
from .codes import HIGH_HALVES, LOW_HALVES, multiply_pairs, narrow_dtype, permute, widen
from .pipeline import KvPipeline, ThreadGroup, copy_bytes
from .row_scales import RowScales, inverse, power_of_two
from .shared_tiles import SharedTiles
from .tiling import THREADS_PER_ROW, BlockTiling

_REST = 1 / 256  # MLA: scales of the columns that are not V count so much; see `_top`
_FINITE = 3.0e38


class CodePipeline(KvPipeline):
    """The stages of codes of a thread group, and the tile of K and V that it multiplies.

    Parameters
    ----------
    tiling : BlockTiling
        With `codes`.
    memory : uint8 Buffer in the scope "shared.dyn"
    begin : int
        Byte at which the stages begin.
    threads : ThreadGroup
    v_begin : int32 expression
        First column of V that the block sums.

    Attributes
    ----------
    k, v : SharedTiles
        The widened tiles, one for each group.
    scales : RowScales
        Of their rows.
    """

    def __init__(self, tiling: BlockTiling, memory, begin: int, threads: ThreadGroup, v_begin):
        codes, positions, count = tiling.codes, tiling.positions, threads.count
        self.is_widened = codes.is_widened
        stages = tiling.stages * count
        self.codes, self.memory, self.v_begin = codes, memory, v_begin
        self.k_codes = SharedTiles(memory, begin, codes.k(positions), stages)
        self.scales_begin = self.k_codes.end
        if not codes.is_latent:
            self.v_codes = SharedTiles(memory, self.k_codes.end, codes.v(positions), stages)
            self.scales_begin = self.v_codes.end
        k_begin = self.scales_begin + stages * codes.scales_bytes(positions)
        if not self.is_widened:
            super().__init__(
                tiling, self.k_codes, self.v_codes, threads, k_chunks=0, v_chunks=0, v_begin=v_begin
            )
            dtype = tiling.kv_dtype
            self.scales = RowScales(memory, self.scales_begin, positions, codes.codec, dtype)
            self._end = k_begin
            return
        k = SharedTiles(memory, k_begin, tiling.k, count)
        if codes.is_latent:
            first_chunk = index_temp(T.truncdiv(v_begin, tiling.k.per_chunk))
            v = SharedTiles(memory, k_begin, tiling.k, count, first_chunk)
        else:
            v = SharedTiles(memory, k.end, tiling.v, count)
        super().__init__(tiling, k, v, threads, k_chunks=0, v_chunks=0, v_begin=v_begin)
        self.scales = RowScales(memory, v.end, positions, codes.codec, tiling.kv_dtype)
        self._end = v.end + count * codes.row_scales_bytes(positions)

    @property
    def end(self) -> int:
        """Byte of shared memory behind all."""
        return self._end

    def for_tiles(
        self, rows, start, end, body: Callable, once: Callable = lambda groups_left: None
    ) -> None:
        """Emit ``body(first, tile)`` as `KvPipeline.for_tiles` does, for widened tiles."""
        if not self.is_widened:
            super().for_tiles(rows, start, end, body, once)
            return

        def visit(first, stage):
            self._widen(rows, first, stage)
            self.threads.sync()
            body(first, index_temp(self.threads.index))

        super().for_tiles(rows, start, end, visit, once)

    # --- copies ---------------------------------------------------------------------------------

    _copies_evenly = False  # few threads copy scales

    def _copy_row(self, rows, i, position, num_bytes, stage) -> None:
        row, unit = i * self._row_step + self.row, self.codes.unit_bytes
        size = index_temp(T.min(num_bytes, unit))

        def copy(tiles, plane: int, row_bytes: int, first_byte, count=None):
            num_units = row_bytes // unit
            with T.unroll(-(-num_units // THREADS_PER_ROW)) as k:
                byte = index_temp((k * THREADS_PER_ROW + self.chunk) * unit)
                with T.If(byte < (row_bytes if count is None else count)), T.Then():
                    to = tiles.pointer(stage, row, T.truncdiv(byte, 16), T.truncmod(byte, 16))
                    source = rows.code_pointer(plane, i, position, first_byte + byte)
                    copy_bytes(to, source, unit, size)

        copy(self.k_codes, K_PLANE, self.codes.row_bytes, 0)
        if not self.codes.is_latent:
            first_byte, count = 0, None
            if self.codes.codec.bits == 8 and self.tiling.slices > 1:
                first_byte, count = self.v_begin, self.codes.v_head_dim - self.v_begin
            copy(self.v_codes, V_PLANE, self.codes.v_bytes, first_byte, count)
        words = self.codes.slot_words
        size = index_temp(T.min(num_bytes, WORD_BYTES))
        with T.unroll(-(-words // THREADS_PER_ROW)) as k:
            word = index_temp(k * THREADS_PER_ROW + self.chunk)
            with T.If(word < words), T.Then():
                plane, rest = self._plane_of(word)
                source = rows.scale_pointer(plane, i, position, rest)
                copy_bytes(self.word_pointer(stage, row, word), source, WORD_BYTES, size)

    def _plane_of(self, word):
        words = self.codes.scale_words
        if self.codes.is_latent:
            return 0, word
        return T.truncdiv(word, words), T.truncmod(word, words)

    def word_pointer(self, stage, row, word, byte=0):
        """Where a word of the scales of a row of a stage is, or a byte of it."""
        size = self.codes.scales_bytes(self.tiling.positions)
        at = stage * size + (row * self.codes.slot_words + word) * WORD_BYTES
        return self.memory.ptr_to([self.scales_begin + at + byte])

    # --- widening -------------------------------------------------------------------------------

    def _widen(self, rows, first, stage) -> None:
        """Widen the tile of a stage, whose positions begin at `first`."""
        tile = index_temp(self.threads.index)
        self._write_row_scales(rows, first, stage, tile)
        self._widen_plane(rows, first, stage, tile, K_PLANE)
        if not self.codes.is_latent:
            self._widen_plane(rows, first, stage, tile, V_PLANE)

    def _for_items(self, count: int, body: Callable) -> None:
        threads = self.threads
        with T.serial(T.ceildiv(count, threads.num_threads)) as turn:
            item = index_temp(turn * threads.num_threads + threads.thread)
            with T.If(item < count), T.Then():
                body(item)

    def _scale_pointer(self, rows, first, stage, row, plane, group):
        """Where the scale of a group of columns of a row is."""
        codes = self.codes
        word = 0 if codes.is_latent else plane * codes.scale_words
        if codes.scale_bits == 32:
            return self.word_pointer(stage, row, word + group)
        byte = group * 2
        if len(codes.groups) % 2:  # the first one may be the second half of a word
            byte = byte + rows.scale_shift(plane, first + row)
        return self.word_pointer(stage, row, word, byte)

    def _group_scale(self, *at):
        """The scale at a place, as `_scale_pointer` takes it."""
        value, pointer = Registers(1, F32, "scale"), self._scale_pointer(*at)
        if self.codes.scale_bits == 32:
            ptx("ld.shared.f32", value[0], pointer)
            return value[0]
        bits = Registers(1, "uint16", "bits")
        ptx("ld.shared.b16", bits[0], pointer)
        return temp(T.reinterpret(F32, T.shift_left(T.cast(bits[0], U32), T.uint32(16))))

    def _store_group_scale(self, *at_and_value) -> None:
        """Replace a scale by another one, which has no more bits than it."""
        *at, value = at_and_value
        if self.codes.scale_bits == 32:
            ptx("st.shared.f32", self._scale_pointer(*at), value)
            return
        bits = T.shift_right(T.reinterpret(U32, value), T.uint32(16))
        ptx("st.shared.b16", self._scale_pointer(*at), T.cast(bits, "uint16"))

    def _top(self, of: Callable):
        """What the scales of a row's groups are relative to, and 0 or NaN, if one of them is.

        4 bits: a power of two, so that the numbers of a group are multiplied exactly. MLA: the
        scale of the columns that are V, unless the others would leave the range of float16.
        """
        top, check = Registers(1, F32, "top"), Registers(1, F32, "check")
        top[0], check[0] = T.float32(0), T.float32(0)
        is_packed, count = self.codes.codec.bits == 4, len(self.codes.groups)

        def add(scale, factor):
            size = T.max(scale, -scale) if is_packed else scale * T.float32(factor)
            top[0] = T.max(top[0], size)
            check[0] = fused_multiply_add(scale, T.float32(0), check[0])

        if is_packed:
            with T.serial(count) as group:
                add(of(group), 1.0)
        else:
            for group in range(count):
                add(of(group), _REST if group else 1.0)
        return temp(power_of_two(top[0]) if is_packed else top[0]), check[0]

    def _write_row_scales(self, rows, first, stage, tile) -> None:
        """Write the scales of rows; where a row has several, leave their ratios to it instead."""
        codes, positions = self.codes, self.tiling.positions
        planes = range(1 if codes.is_latent else 2)

        def write(item):
            row, plane = index_temp(T.truncmod(item, positions)), T.truncdiv(item, positions)
            plane = index_temp(plane)

            def scale_of(group):
                return self._group_scale(rows, first, stage, row, plane, group)

            if self._has_ratios:
                top, check = self._top(scale_of)
                scale, factor = temp(top + check), temp(inverse(top))
                with T.serial(len(codes.groups)) as group:
                    of_group = scale_of(group)
                    # The scale of the row is NaN if one of its groups is.
                    is_finite = T.max(of_group, -of_group) < T.float32(_FINITE)
                    ratio = T.if_then_else(is_finite, of_group * factor, T.float32(0))
                    self._store_group_scale(rows, first, stage, row, plane, group, temp(ratio))
            else:
                scale = scale_of(0)
            for own in (0, 1) if codes.is_latent else (plane,):
                ptx("st.shared.f32", self.scales.pointer(tile, row, own), scale)

        self._for_items(len(planes) * positions, write)
        if self._has_ratios:
            self.threads.sync()

    @property
    def _has_ratios(self) -> bool:
        return len(self.codes.groups) > 1 or self.codes.codec.bits == 4

    def _group_of(self, column):
        if self.codes.codec.group_size:
            return T.truncdiv(column, self.codes.codec.group_size)
        if len(self.codes.groups) == 1:
            return 0
        return index_temp(T.if_then_else(column < self.codes.v_head_dim, 0, 1))

    def _widen_plane(self, rows, first, stage, tile, plane: int) -> None:
        codes, unit = self.codes, self.codes.widened_bytes
        dtype = narrow_dtype(self.tiling.kv_dtype)
        source, to, row_bytes = self.k_codes, self.k, codes.row_bytes
        if plane == V_PLANE:
            source, to, row_bytes = self.v_codes, self.v, codes.v_bytes
        units = row_bytes // unit
        is_packed = codes.codec.bits == 4
        halves = range(2 if is_packed else 1)

        def widen_unit(item):
            row, at = (index_temp(f(item, units)) for f in (T.truncdiv, T.truncmod))
            byte = index_temp(at * unit)
            words = Registers(unit // 4, U32, "codes")
            pointer = source.pointer(stage, row, T.truncdiv(byte, 16), T.truncmod(byte, 16))
            taken = [words[i] for i in range(words.count)]
            ptx(f"ld.shared.v{words.count}.b32", *taken, pointer)
            for half in halves:
                column = index_temp(byte + half * row_bytes)
                pairs = []
                for i in range(words.count):
                    even, odd = widen(codes.codec, dtype, words[i], half)
                    pairs += [permute(even, odd, s) for s in (LOW_HALVES, HIGH_HALVES)]
                ratio = None
                if self._has_ratios:
                    group = self._group_of(column)
                    ratio = self._group_scale(rows, first, stage, row, plane, group)
                self._store(to, tile, row, column, pairs, ratio, plane)

        self._for_items(self.tiling.positions * units, widen_unit)

    def _store(self, to: SharedTiles, tile, row, column, pairs: list, ratio, plane: int) -> None:
        """Store the pairs of a run of columns, which are of one group."""
        tiling = self.tiling
        words = self._scaled(pairs, ratio)
        if plane == V_PLANE and tiling.slices > 1 and self.codes.codec.bits == 4:
            column = index_temp(column - self.v_begin)
            is_own = T.And(column >= 0, column < tiling.columns)
            with T.If(is_own), T.Then():
                self._store_words(to, tile, row, column, words)
        else:
            self._store_words(to, tile, row, column, words)

    def _scaled(self, pairs: list, ratio) -> list:
        """Words of the tile of K or V."""
        dtype = self.tiling.kv_dtype
        if dtype != F32 and ratio is None:
            return pairs
        if dtype != F32 and self.codes.codec.bits == 4:
            factor = Registers(1, U32, "factor")
            pack(factor[0], dtype, ratio, ratio)
            return [multiply_pairs(dtype, pair, factor[0]) for pair in pairs]
        words = []
        for pair in pairs:
            values = Registers(2, F32, "values")
            unpack(pair, narrow_dtype(dtype), values[0], values[1])
            if ratio is not None:
                for e in range(2):
                    values[e] = values[e] * ratio
            if dtype == F32:
                words += [T.reinterpret(U32, values[e]) for e in range(2)]
            else:
                word = Registers(1, U32, "word")
                pack(word[0], dtype, values[0], values[1])
                words.append(word[0])
        return words

    @staticmethod
    def _store_words(to: SharedTiles, tile, row, column, words: list) -> None:
        chunk = T.truncdiv(column, to.layout.per_chunk)
        for i in range(0, len(words), 4):
            ptx("st.shared.v4.b32", to.pointer(tile, row, chunk + i // 4), *words[i : i + 4])
