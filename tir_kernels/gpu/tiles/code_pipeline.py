# SPDX-License-Identifier: Apache-2.0
"""The pipeline of quantized K and V: codes and scales are copied, and widened when they are there.

The stages hold codes, so as many bytes are in flight as pages have. A tile that has arrived is
widened once for all warps that multiply it: to values of the type of Q, and one scale for each row
of K and V. Where the columns of a row have several scales, its values are multiplied by these
relative to the largest one.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ..registers import F32, U32, Registers, index_temp, temp
from .code_tiling import WORD_BYTES
from .pipeline import KvPipeline
from .row_scales import RowScales, inverse, power_of_two
from .shared_tiles import SharedTiles
from .tiling import THREADS_PER_ROW, BlockTiling

_REST = 1 / 256  # MLA: scales of the columns that are not V count so much; see `_add_scale`
_FINITE = 3.0e38


class CodePipeline(KvPipeline):
    """The stages of codes of a thread group, and the tile of K and V that it multiplies.

    Parameters
    ----------
    spec, tiling, memory, begin, threads, v_slice, rows : see `KvPipeline`
        The tiling has `codes`.

    Attributes
    ----------
    k, v : SharedTiles
        The widened tiles, one for each group; the codes where these are widened in registers.
    scales : RowScales
        Of their rows.
    """

    def _lay_out(self, spec: KernelSpec, memory, begin: int, v_slice) -> None:
        codes, positions = self.tiling.codes, self.tiling.positions
        stages, count = self.tiling.stages * self.threads.count, self.threads.count
        self.codes, self.memory = codes, memory
        self.k_codes = SharedTiles(memory, begin, codes.k(positions), stages)
        self.scales_begin = self.k_codes.end
        if not codes.is_latent:
            self.v_codes = SharedTiles(memory, self.k_codes.end, codes.v(positions), stages)
            self.scales_begin = self.v_codes.end
        scales_begin = self.scales_begin
        self.end_byte = scales_begin + stages * codes.scales_bytes(positions)
        if codes.is_widened:
            self._lay_out_tiles(memory, self.end_byte, count, v_slice)
            scales_begin = self.v.end
            self.end_byte = self.v.end + count * codes.row_scales_bytes(positions)
        else:
            self.k, self.v = self.k_codes, self.v_codes
        dtype = self.tiling.kv_dtype
        self.scales = RowScales(memory, scales_begin, positions, codes.codec, dtype)
        self.has_ratios = len(codes.groups) > 1 or codes.codec.bits == 4
        self.row_scale = T.local_scalar("float32")
        self.num_planes = 1 if codes.is_latent else 2
        self.v_chunks = 0
        self.copies_evenly = False  # few threads copy scales

    def stage(self, tile):
        """Return which tile of `k` and `v` holds a tile that was waited for."""
        return self.threads.index if self.codes.is_widened else self._stage_of_copies(tile)

    @inline
    def wait(self, tile):
        """Wait for a tile, start the copies of a later one, and widen the codes."""
        self._wait_for_copies(tile)
        if self.codes.is_widened:
            first = self.first_position(tile)
            stage = self._stage_of_copies(tile)
            self._write_row_scales(first, stage)
            if self.has_ratios:
                self.threads.sync()
            self._widen(first, stage, K_PLANE, self.k_codes, self.k, self.codes.row_bytes)
            if not self.codes.is_latent:
                self._widen(first, stage, V_PLANE, self.v_codes, self.v, self.codes.v_bytes)
            self.threads.sync()

    # --- copies ---------------------------------------------------------------------------------

    @inline
    def _copy_row(self, i, position, num_bytes, stage):
        """Copy the codes and scales of the thread's i-th row; nothing where `num_bytes` is 0."""
        row = T.meta_var(i * self.row_step + self.row)
        size = T.min(num_bytes, self.codes.copied_bytes)
        self._copy_codes(K_PLANE, self.k_codes, self.codes.row_bytes, (i, position, size, stage))
        if not self.codes.is_latent:
            self._copy_codes(V_PLANE, self.v_codes, self.codes.v_bytes, (i, position, size, stage))
        word_size = T.min(num_bytes, WORD_BYTES)
        for turn in T.unroll(-(-self.codes.slot_words // THREADS_PER_ROW)):
            word = turn * THREADS_PER_ROW + self.chunk
            if word < self.codes.slot_words:
                source = T.meta_var(self.rows.scale_source(*self._plane_of(word, i, position)))
                to = T.meta_var(self.word_place(stage, row, word))
                self.memory.copy(to, source, WORD_BYTES, word_size)

    @inline
    def _copy_codes(self, plane: int, tiles, row_bytes: int, at):
        for turn in T.unroll(-(-(row_bytes // self.codes.copied_bytes) // THREADS_PER_ROW)):
            byte = (turn * THREADS_PER_ROW + self.chunk) * self.codes.copied_bytes
            if byte < self._bytes_left(plane, row_bytes):
                self._copy_bytes(plane, tiles, byte, at)

    @property
    def _is_sliced(self) -> bool:
        """Whether the codes of V that are copied are those of the slice only."""
        return self.codes.codec.bits == 8 and self.tiling.slices > 1

    def _bytes_left(self, plane: int, row_bytes: int):
        is_slice = plane == V_PLANE and self._is_sliced
        return self.codes.v_head_dim - self.v_begin if is_slice else row_bytes

    def _copy_bytes(self, plane: int, tiles: SharedTiles, byte, at: tuple) -> None:
        i, position, size, stage = at
        row = i * self.row_step + self.row
        to = tiles.place(stage, row, T.truncdiv(byte, 16), T.truncmod(byte, 16))
        first_byte = self.v_begin if plane == V_PLANE and self._is_sliced else 0
        source = self.rows.code_source(plane, i, position, first_byte + byte)
        self.memory.copy(to, source, self.codes.copied_bytes, size)

    def _plane_of(self, word, i, position) -> tuple:
        """Return the arguments of `QuantizedRows.scale_source` for a word of a slot."""
        words = self.codes.scale_words
        if self.codes.is_latent:
            return 0, i, position, word
        return T.truncdiv(word, words), i, position, T.truncmod(word, words)

    def word_place(self, stage, row, word, byte=0):
        """Return the byte of a word of the scales of a row of a stage, or a later one of it."""
        size = self.codes.scales_bytes(self.tiling.positions)
        at = stage * size + (row * self.codes.slot_words + word) * WORD_BYTES
        return self.scales_begin + at + byte

    # --- scales of groups of columns ------------------------------------------------------------

    def _scale_place(self, first, stage, row, plane, group):
        """Return the byte of the scale of a group of columns of a row."""
        codes = self.codes
        word = 0 if codes.is_latent else plane * codes.scale_words
        if codes.scale_bits == 32:
            return self.word_place(stage, row, word + group)
        byte = group * 2
        if len(codes.groups) % 2:  # the first one may be the second half of a word
            byte = byte + self.rows.scale_shift(plane, first + row)
        return self.word_place(stage, row, word, byte)

    def _group_scale(self, *at):
        """The scale at a place, as `_scale_place` takes it."""
        value, place = Registers(1, F32, "scale"), self._scale_place(*at)
        if self.codes.scale_bits == 32:
            self.memory.load([*value], place)
            return value[0]
        return temp(T.reinterpret(F32, T.shift_left(self.memory.load_half(place), T.uint32(16))))

    def _store_group_scale(self, place, value) -> None:
        """Replace a scale by another one, which has no more bits than it."""
        if self.codes.scale_bits == 32:
            self.memory.store(place, value)
            return
        bits = T.shift_right(T.reinterpret(U32, value), T.uint32(16))
        self.memory.store_half(place, bits)

    @inline
    def _write_row_scales(self, first, stage):
        """Write the scales of rows; where a row has several, leave their ratios to it instead."""
        for turn in T.serial(
            T.ceildiv(self.num_planes * self.tiling.positions, self.threads.num_threads)
        ):
            item = turn * self.threads.num_threads + self.threads.thread
            if item < self.num_planes * self.tiling.positions:
                row = T.truncmod(item, self.tiling.positions)
                plane = T.truncdiv(item, self.tiling.positions)
                if self.has_ratios:
                    self._make_ratios((first, stage, row, plane))
                else:
                    self.row_scale = self._group_scale(first, stage, row, plane, 0)
                self.memory.store(self._row_scale_place(row, plane), self.row_scale)
                if self.codes.is_latent:
                    self.memory.store(self._row_scale_place(row, 1), self.row_scale)

    def _row_scale_place(self, row, plane):
        return self.scales.place(self.threads.index, row, plane)

    @inline
    def _make_ratios(self, at):
        """Find what the scales of a row's groups are relative to, and leave their ratios.

        4 bits: a power of two, so that the values of a group are multiplied exactly. MLA: the
        scale of the columns that are V, unless the others would leave the range of float16. The
        scale of the row is NaN if one of its groups is.
        """
        top = T.float32(0)
        check = T.float32(0)  # 0, or NaN
        if self.codes.codec.bits == 4:
            for group in T.serial(len(self.codes.groups)):
                of_group = self._group_scale(*at, group)
                top = T.max(top, T.max(of_group, -of_group))
                check = self.isa.fused_multiply_add(of_group, T.float32(0), check)
            top = power_of_two(top)
        else:
            for group in T.unroll(len(self.codes.groups)):
                of_group = self._group_scale(*at, group)
                weight = T.meta_var(T.if_then_else(group == 0, T.float32(1), T.float32(_REST)))
                top = T.max(top, of_group * weight)
                check = self.isa.fused_multiply_add(of_group, T.float32(0), check)
        self.row_scale = top + check
        factor = inverse(top)
        for group in T.serial(len(self.codes.groups)):
            of_group = self._group_scale(*at, group)
            is_finite = T.meta_var(T.max(of_group, -of_group) < T.float32(_FINITE))
            ratio = T.if_then_else(is_finite, of_group * factor, T.float32(0))
            self._store_group_scale(self._scale_place(*at, group), ratio)

    # --- widening -------------------------------------------------------------------------------

    @inline
    def _widen(self, first, stage, plane: int, source, to, row_bytes: int):
        """Widen the codes of K or V of a stage, whose positions begin at `first`."""
        num_runs = T.meta_var(row_bytes // self.codes.widened_bytes)
        num_items = T.meta_var(self.tiling.positions * num_runs)
        for turn in T.serial(T.ceildiv(num_items, self.threads.num_threads)):
            item = turn * self.threads.num_threads + self.threads.thread
            if item < num_items:
                row = T.truncdiv(item, num_runs)
                run = T.truncmod(item, num_runs)
                byte = run * self.codes.widened_bytes
                words = T.meta_var(self._load_codes(source, stage, row, byte))
                self._widen_words(words, to, row, byte, (first, stage, row, plane), 0)
                if self.codes.codec.bits == 4:  # the other codes of the bytes, half a row away
                    column = byte + row_bytes
                    self._widen_words(words, to, row, column, (first, stage, row, plane), 1)

    def _load_codes(self, source: SharedTiles, stage, row, byte) -> list:
        words = Registers(self.codes.widened_bytes // 4, U32, "codes")
        place = source.place(stage, row, T.truncdiv(byte, 16), T.truncmod(byte, 16))
        self.memory.load([*words], place)
        return [*words]

    @inline
    def _widen_words(self, words, to, row, column, at, half: int):
        """Store the values of a run of columns, which are of one group."""
        wide = T.meta_var(self._wide_words(words, half, column, at))
        if at[3] == V_PLANE and self.tiling.slices > 1 and self.codes.codec.bits == 4:
            own = column - self.v_begin
            if T.And(own >= 0, own < self.tiling.columns):
                self._store_words(to, row, own, wide)
        else:
            self._store_words(to, row, column, wide)

    def _wide_words(self, words: list, half: int, column, at: tuple) -> list:
        """Return the words of the tile of K or V."""
        codec, dtype = self.codes.codec, self.tiling.kv_dtype
        wide = []
        for word in words:
            wide += self.isa.widen_codes(codec, self.isa.widened_dtype(dtype), word, half)
        ratio = self._group_scale(*at, self._group_of(column)) if self.has_ratios else None
        if dtype != F32 and ratio is None:
            return wide
        if dtype != F32 and codec.bits == 4:
            factor = Registers(1, U32, "factor")
            self.isa.pack(factor[0], dtype, ratio, ratio)
            return [self.isa.multiply_pairs(dtype, pair, factor[0]) for pair in wide]
        return [word for pair in wide for word in self._scaled(pair, ratio)]

    def _group_of(self, column):
        if self.codes.codec.group_size:
            return T.truncdiv(column, self.codes.codec.group_size)
        if len(self.codes.groups) == 1:
            return 0
        return index_temp(T.if_then_else(column < self.codes.v_head_dim, 0, 1))

    def _scaled(self, word, ratio) -> list:
        """Return two values times a ratio, if there is one: two words of float32, or one word."""
        dtype, values = self.tiling.kv_dtype, Registers(2, F32, "values")
        self.isa.unpack(word, self.isa.widened_dtype(dtype), values[0], values[1])
        if ratio is not None:
            for e in range(2):
                values[e] = values[e] * ratio
        if dtype == F32:
            return [T.reinterpret(U32, values[e]) for e in range(2)]
        word = Registers(1, U32, "word")
        self.isa.pack(word[0], dtype, values[0], values[1])
        return [word[0]]

    def _store_words(self, to: SharedTiles, row, column, words: list) -> None:
        chunk, tile = T.truncdiv(column, to.layout.per_chunk), self.threads.index
        for i in range(0, len(words), 4):
            self.memory.store(to.place(tile, row, chunk + i // 4), *words[i : i + 4])


def kv_pipeline(spec: KernelSpec, tiling: BlockTiling, *arguments) -> KvPipeline:
    """Make the pipeline for a tiling; the arguments are those of `KvPipeline`."""
    return (CodePipeline if tiling.codes else KvPipeline)(spec, tiling, *arguments)
