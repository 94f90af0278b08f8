# SPDX-License-Identifier: Apache-2.0
"""Products with Hadamard matrices: of rows in shared memory, and of accumulators.

A row is multiplied by blocks on the diagonal, whose sizes are powers of two from 32 on. Each bit of
the index in a block gives one step of sums and differences; the order of the bits does not matter.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..emit import F32, WARP, Registers, index_temp
from ..warp import shuffle_xor
from .online_softmax import Accumulators
from .shared_tiles import SharedTiles
from .tiling import BlockTiling


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


def _combine(values: Registers, i, j) -> None:
    """Sum and difference of two registers."""
    low, high = Registers(1, F32, "low"), Registers(1, F32, "high")
    low[0], high[0] = values[i], values[j]
    values[i] = low[0] + high[0]
    values[j] = low[0] - high[0]


def _combine_lanes(value, lane, mask: int):
    """Sum or difference of the values of two lanes."""
    other = shuffle_xor(value, mask)
    return other + T.Select(T.bitwise_and(lane, mask) == 0, value, -value)


def rotate_rows(tiles: SharedTiles, tile, num_rows: int, blocks: list, threads) -> None:
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
    lane = index_temp(T.truncmod(threads.thread, WARP))
    warp, num_warps = T.truncdiv(threads.thread, WARP), threads.num_threads // WARP
    with T.serial(T.ceildiv(num_rows, num_warps)) as turn:
        row = index_temp(turn * num_warps + warp)
        with T.If(row < num_rows), T.Then():
            for first, size in blocks:
                _rotate_block(tiles, tile, row, first, size, lane)


def _rotate_block(tiles: SharedTiles, tile, row, first: int, size: int, lane) -> None:
    count = size // WARP  # elements of a lane
    column = index_temp(first + lane * count)
    values = Registers(count, F32, "rotated")
    if count == 1:
        values[0] = tiles.load_float(tile, row, column)
    else:
        loaded = tiles.load_floats(tile, row, column, count)
        for i in range(count):
            values[i] = loaded[i]
    rotate_registers(values, lane)
    if count == 1:
        tiles.store_float(tile, row, column, values[0])
    for i in range(0, count - 1, 2):
        tiles.store_pair(tile, row, column + i, values[i], values[i + 1])


def rotate_registers(values: Registers, lane) -> None:
    """Multiply a block, of which each lane of a warp has `count` columns, by its matrix."""
    step = 1
    while step < values.count:
        for i in (i for i in range(values.count) if not i & step):
            _combine(values, i, i + step)
        step *= 2
    for mask in (1, 2, 4, 8, 16):
        for i in range(values.count):
            values[i] = _combine_lanes(values[i], lane, mask)
    factor = T.float32((values.count * WARP) ** -0.5)
    for i in range(values.count):
        values[i] = values[i] * factor


def rotate_accumulators(sums: Accumulators, blocks: list, lane) -> None:
    """Multiply the rows of accumulators by the Hadamard blocks."""
    for first, size in blocks:
        begin, count = first // 8, size // 8
        for mask in (1, 2):  # the four lanes of a row
            with T.unroll(count) as n:
                for h in range(sums.rows):
                    for e in range(2):
                        at = begin + n, h, e
                        sums[at] = _combine_lanes(sums[at], lane, mask)
        factor = T.float32(size**-0.5)
        with T.unroll(count) as n:
            for h in range(sums.rows):
                pair = [sums.register(begin + n, h, e) for e in range(2)]
                _combine(sums.registers, *pair)
                for i in pair:
                    sums.registers[i] = sums.registers[i] * factor
        step = 1
        while step < count:
            with T.unroll(count // 2) as pair:
                n = begin + pair // step * (2 * step) + pair % step
                for h in range(sums.rows):
                    for e in range(2):
                        at = (sums.register(n + side, h, e) for side in (0, step))
                        _combine(sums.registers, *at)
            step *= 2
