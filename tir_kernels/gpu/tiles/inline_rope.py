# SPDX-License-Identifier: Apache-2.0
"""Rotation of Q and K in shared memory, for ``rotary_mode`` 1: the pages hold K as it came."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...semantics.rope import has_rope, inverse_frequencies, sin_cos
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import F32, temp
from .pipeline import ThreadGroup
from .shared_tiles import SharedTiles


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
