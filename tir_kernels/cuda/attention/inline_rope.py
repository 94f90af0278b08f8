# SPDX-License-Identifier: Apache-2.0
"""Rotation of Q and K in shared memory, for ``rotary_mode`` 1: the pages hold K as it came."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.rope import inverse_frequencies, sin_cos
from ...semantics.rotary_mode import has_rope
from ...spec import KernelSpec
from .. import scalars
from ..emit import F32, index_temp, sync_block
from ..tiles.pipeline import ThreadGroup
from ..tiles.shared_tiles import SharedTiles


class InlineRope:
    """The rotation of one kernel.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's argument `rotary_mode`, or none: rows are rotated already.
    length : int32 expression
        Positions of the sequence, the dropped ones included.
    """

    def __init__(self, spec: KernelSpec, a, length):
        self.spec, self.length = spec, length
        # Rows of a kernel that cannot be asked to rotate them are rotated already.
        self.mode = a.rotary_mode
        self.may_rotate = has_rope(spec) and self.mode is not None
        self.half = spec.rope.rotary_dim // 2

    def rotate(
        self, tiles: SharedTiles, tile, num_rows: int, threads: ThreadGroup, position: Callable
    ) -> None:
        """Rotate a tile of Q or K by a group of threads.

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
        if not self.may_rotate:
            return
        half, num_threads = self.half, threads.num_threads
        with T.If(self.mode == 1), T.Then():
            with T.serial(T.ceildiv(num_rows * half, num_threads)) as turn:
                item = index_temp(turn * num_threads + threads.thread)
                with T.If(item < num_rows * half), T.Then():
                    row, i = (
                        index_temp(x) for x in (T.truncdiv(item, half), T.truncmod(item, half))
                    )
                    rotation = self._sin_cos(position(row), i)
                    x, y = (tiles.load_float(tile, row, column) for column in (i, i + half))
                    tiles.store_float(tile, row, i, x * rotation.cos - y * rotation.sin)
                    tiles.store_float(tile, row, i + half, y * rotation.cos + x * rotation.sin)
            sync_block()

    def _sin_cos(self, position, i):
        rope = self.spec.rope
        scaled = T.cast(position, F32)
        if rope.scale != 1.0:
            scaled = scaled * T.float32(rope.scale)
        frequency = scalars.lookup(inverse_frequencies(rope).inv_freq, i)
        if rope.kind == "longrope":
            original = dict(rope.scaling)["original_max_position_embeddings"]
            of_long = scalars.lookup(inverse_frequencies(rope, use_long=True).inv_freq, i)
            frequency = T.Select(self.length > original, of_long, frequency)
        rotation = sin_cos(scalars.temp(scaled) * frequency, 1, scalars)
        factor = inverse_frequencies(rope).attention_factor
        if factor == 1.0:
            return rotation
        scaled = (scalars.temp(x * T.float32(factor)) for x in (rotation.sin, rotation.cos))
        return type(rotation)(*scaled)
