# SPDX-License-Identifier: Apache-2.0
"""Rotations of rows: RoPE of tiles in shared memory, and products with Hadamard matrices.

RoPE is for ``rotary_mode`` 1, where the pages hold K as it came. For codes of 4 bits a row is
multiplied by blocks on the diagonal, whose sizes are powers of two from 32 on. Each bit of the
index in a block gives one step of sums and differences; the order of the bits does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...semantics.rope import has_rope, inverse_frequencies, sin_cos
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import F32, WARP, Registers, index_temp, temp
from .pipeline import ThreadGroup
from .shared_tiles import SharedTiles
from .tiling import BlockTiling


@T.meta_class
class InlineRope:
    """The rotation of one kernel.

    Parameters
    ----------
    spec : KernelSpec
    mode : int32 expression or None
        The kernel's argument `rotary_mode`; rows of a kernel without it are rotated already.

    Attributes
    ----------
    may_rotate : bool
        Whether a call may ask for it.
    """

    def __init__(self, spec: KernelSpec, mode):
        self.spec, self.mode, self.isa = spec, mode, isa_of(spec.target)
        self.may_rotate = has_rope(spec) and mode is not None
        self.half = spec.rope.rotary_dim // 2
        self.length = T.local_scalar("int32")

    @inline
    def begin(self, length):
        """Start a sequence of `length` positions, the dropped ones included."""
        self.length = length

    @inline
    def rotate(
        self, tiles: SharedTiles, tile, num_rows: int, threads: ThreadGroup, position: Callable
    ):
        """Rotate a tile of Q or K by a group of threads, if the call asks for it.

        Parameters
        ----------
        tiles : SharedTiles
        tile : int32 expression
            Which of the tiles.
        num_rows : int
            Rows of the tile.
        threads : ThreadGroup
        position : callable
            Row -> its RoPE position.
        """
        if self.may_rotate:
            if self.mode == 1:
                for turn in T.serial(T.ceildiv(num_rows * self.half, threads.num_threads)):
                    item = turn * threads.num_threads + threads.thread
                    if item < num_rows * self.half:
                        row = T.truncdiv(item, self.half)
                        i = T.truncmod(item, self.half)
                        rotation = T.meta_var(self._sin_cos(position(row), i))
                        x = tiles.load_float(tile, row, i)
                        y = tiles.load_float(tile, row, i + self.half)
                        first = T.meta_var(x * rotation.cos - y * rotation.sin)
                        second = T.meta_var(y * rotation.cos + x * rotation.sin)
                        tiles.store_float(tile, row, i, first)
                        tiles.store_float(tile, row, i + self.half, second)
                threads.sync()

    def _sin_cos(self, position, i):
        rope = self.spec.rope
        scaled = T.cast(position, F32)
        if rope.scale != 1.0:
            scaled = scaled * T.float32(rope.scale)
        frequency = self.isa.lookup(inverse_frequencies(rope).inv_freq, i)
        if rope.kind == "longrope":
            original = dict(rope.scaling)["original_max_position_embeddings"]
            of_long = self.isa.lookup(inverse_frequencies(rope, use_long=True).inv_freq, i)
            frequency = T.Select(self.length > original, of_long, frequency)
        rotation = sin_cos(temp(scaled) * frequency, 1, self.isa)
        factor = inverse_frequencies(rope).attention_factor
        if factor == 1.0:
            return rotation
        scaled = (temp(x * T.float32(factor)) for x in (rotation.sin, rotation.cos))
        return type(rotation)(*scaled)


def blocks_of(begin: int, end: int) -> list[tuple[int, int]]:
    """First column and size of the blocks of the columns ``begin .. end - 1``."""
    width = end - begin
    size = width & -width
    return [(first, size) for first in range(begin, end, size)] if width else []


def hadamard_blocks(tiling: BlockTiling) -> tuple[list, list]:
    """Blocks of Q and of O for a tiling; none where rows are not multiplied."""
    codes = tiling.codes
    if not codes or not codes.codec.has_hadamard:
        return [], []
    if tiling.slices > 1:
        raise ValueError(
            f"kv_dtype {codes.codec.name!r} needs all columns of V in a block, which has room for "
            f"{tiling.columns} of {codes.v_head_dim}; choose 'int8' or 'float8_e4m3fn'"
        )
    v_width = codes.v_head_dim if codes.is_latent else codes.qk_head_dim
    q_blocks = blocks_of(0, v_width) + blocks_of(v_width, codes.qk_head_dim)
    return q_blocks, blocks_of(0, codes.v_head_dim)


def _combine_lanes(isa, value, lane, mask: int):
    """Sum or difference of the values of two lanes."""
    other = isa.shuffle_xor(value, mask)
    return other + T.Select(T.bitwise_and(lane, mask) == 0, value, -value)


@inline
def rotate_rows(tiles, tile, num_rows: int, blocks: list, threads):
    """Multiply rows of a tile by the Hadamard blocks; a warp takes every few rows.

    Parameters
    ----------
    tiles : SharedTiles
    tile : int32 expression
    num_rows : int
    blocks : list of (int, int)
        What `blocks_of` returns.
    threads : ThreadGroup
        Whole warps.
    """
    num_warps = T.meta_var(threads.num_threads // WARP)
    lane = T.truncmod(threads.thread, WARP)
    for turn in T.serial(T.ceildiv(num_rows, num_warps)):
        row = turn * num_warps + T.truncdiv(threads.thread, WARP)
        if row < num_rows:
            _rotate_row(tiles, tile, row, blocks, lane)


def _rotate_row(tiles: SharedTiles, tile, row, blocks: list, lane) -> None:
    for first, size in blocks:
        count = size // WARP  # elements of a lane
        column = index_temp(first + lane * count)
        if count == 1:
            values = Registers(1, F32, "rotated")
            values[0] = tiles.load_float(tile, row, column)
        else:
            values = tiles.load_floats(tile, row, column, count)
        rotate_registers(tiles.isa, values, lane)
        if count == 1:
            tiles.store_float(tile, row, column, values[0])
        for i in range(0, count - 1, 2):
            tiles.store_pair(tile, row, column + i, values[i], values[i + 1])


def rotate_registers(isa, values: Registers, lane) -> None:
    """Multiply a block, of which each lane of a warp has `count` columns, by its matrix."""
    step = 1
    while step < values.count:
        for i in (i for i in range(values.count) if not i & step):
            _combine(values.buffer, (i,), (i + step,))
        step *= 2
    for mask in (1, 2, 4, 8, 16):
        for i in range(values.count):
            values[i] = _combine_lanes(isa, values[i], lane, mask)
    factor = T.float32((values.count * WARP) ** -0.5)
    for i in range(values.count):
        values[i] = values[i] * factor


def _combine(values, i: tuple, j: tuple, factor=None) -> None:
    """Replace two registers by their sum and their difference, perhaps times a factor."""
    low, high = (temp(values[at]) for at in (i, j))
    for at, result in ((i, low + high), (j, low - high)):
        T.buffer_store(values, result if factor is None else result * factor, list(at))


def rotate_accumulators(isa, sums, blocks: list, lane) -> None:
    """Multiply the rows of accumulators by the Hadamard blocks."""
    for first, size in blocks:
        _rotate_columns(isa, sums, first // 8, size // 8, lane)


@inline
def _rotate_columns(isa, sums, begin: int, count: int, lane):
    """Multiply `count` tiles of eight columns by one block."""
    rows = T.meta_var(sums.shape[1])
    for bit in T.unroll(2):  # of the number of a lane among those that share a row
        for n in T.unroll(count):
            for h in T.unroll(rows):
                for e in T.unroll(2):
                    at = T.meta_var((begin + n, h, e))
                    sums[at] = _combine_lanes(isa, sums[at], lane, T.shift_left(1, bit))
    factor = T.meta_var(T.float32((8 * count) ** -0.5))
    for n in T.unroll(count):
        for h in T.unroll(rows):
            _combine(sums, (begin + n, h, 0), (begin + n, h, 1), factor)
    for bit in T.unroll(count.bit_length() - 1):
        for pair in T.unroll(count // 2):
            step = T.meta_var(T.shift_left(1, bit))
            n = T.meta_var(begin + T.truncdiv(pair, step) * (2 * step) + T.truncmod(pair, step))
            for h in T.unroll(rows):
                for e in T.unroll(2):
                    _combine(sums, (n, h, e), (n + step, h, e))
