# SPDX-License-Identifier: Apache-2.0
"""Rotations of Q, K and O inside attention kernels.

`InlineRope` serves ``rotary_mode`` 1: pages hold K as it came. The table is the one baked from the
spec; a call that passes another base or scale is refused. `HadamardRotation` serves pages that keep
K and V multiplied with Hadamard matrices.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..script import inline
from ..semantics.hadamard import k_parts, v_parts
from ..semantics.rope import (
    has_rope,
    inverse_frequencies,
    refuse_inline,
    require_own_rotation,
    sin_cos,
)
from ..signatures.inputs import AttentionInputs, PagedInputs
from ..spec import KernelSpec
from .isa import simd
from .isa.cos_sin import CosSin
from .isa.hadamard import transform
from .isa.simd import F32, broadcast, constant, literal, load, store, store_row, temp


@T.meta_class
class InlineRope:
    """The rotation of rows of Q and K, each in `row`, which a task owns.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments `rotary_mode`, `rope_theta` and `rope_scale`.

    Attributes
    ----------
    rotates_q, rotates_k : bool, or an expression that the call decides
        Whether rows of Q and of K are rotated.
    restores : bool
        Whether rows of O, sums of V, are to be multiplied back by `restore`.
    row : float32 array
        The last row that was rotated, in a multiple of 32 columns.
    """

    restores = False

    def __init__(self, spec: KernelSpec, a):
        self.rope, self.width, self.lanes = spec.rope, spec.qk_head_dim, spec.target.lanes
        self.half = spec.rope.rotary_dim // 2
        self.fits = has_rope(spec)
        self.mode = a.rotary_mode
        self.rotates_q = self.rotates_k = self.mode == 1 if self.fits else False
        require_own_rotation(spec, a)

    def restore(self, o, row) -> None:
        """Rows of O are as V is, which is not rotated."""

    def begin_task(self) -> None:
        """Make the buffers of a task."""
        if self.fits:
            self.row = T.alloc_buffer((-(-self.width // 32) * 32,), F32)
            self.frequencies = T.alloc_buffer((self.half,), F32)
            self.angles = CosSin(self.rope, self.lanes)

    @inline
    def begin_sequence(self, length):
        """Take the frequencies for a sequence of `length` positions."""
        if self.fits:
            if self.rope.kind == "longrope":
                if length > dict(self.rope.scaling)["original_max_position_embeddings"]:
                    self._fill(use_long=True)
                else:
                    self._fill(use_long=False)
            else:
                self._fill(use_long=False)

    def _fill(self, use_long: bool) -> None:
        table = inverse_frequencies(self.rope, use_long).inv_freq
        store_row(
            self.frequencies, (), self.half, self.lanes, lambda i, n: literal(table[i : i + n])
        )

    def angles_of(self, num_positions: int) -> CosSin | None:
        """Return a table that `set_position` and `rotate` take, for positions of several heads."""
        return CosSin(self.rope, self.lanes, num_positions) if self.fits else None

    def rotate(self, source: Callable, angles: CosSin | None = None, i=0) -> None:
        """Rotate a row, ``source(column, lanes) -> vector``, into `row`; by row i of `angles`."""
        rotated, angles = 2 * self.half, angles or self.angles
        angles.rotate(source, lambda c, n, value: store(self.row, (c,), n, value), i)
        for start, lanes in simd.chunks(self.width - rotated, self.lanes):
            store(self.row, (rotated + start,), lanes, source(rotated + start, lanes))

    def set_position(self, position, angles: CosSin | None = None, i=0) -> None:
        """Compute the angles for `rotate`, as row i of `angles` where several are kept."""
        frequencies = self.frequencies
        (angles or self.angles).fill(position, lambda c, n: load(frequencies, (c,), n), i)

    def begin_row(self, token, position) -> None:
        """Take the angles of a row of Q, which is a token of the call at a position."""
        self.set_position(position)

    @inline
    def rotate_tile(self, ops, k, num_positions, first_position, offsets):
        """Rotate a packed tile of K in place.

        Parameters
        ----------
        k : ``(element, position) -> (buffer, index)``
        offsets : ``(column, lanes) -> int32 vector``, positions relative to `first_position`.
        """
        lanes = T.meta_var(self.lanes)
        for element in range(self.half // ops.values_per_element):
            for v in range(num_positions // lanes):
                position = T.meta_var(broadcast(first_position, lanes) + offsets(v * lanes, lanes))
                self._rotate_elements(ops, k, element, v * lanes, position)

    def _rotate_elements(self, ops, k, element, column, position) -> None:
        """Rotate an element of a vector of positions, and the one half a rotation behind."""
        lanes, factor = self.lanes, inverse_frequencies(self.rope).attention_factor
        position = T.cast(position, simd.vector_type(F32, lanes))
        if self.rope.scale != 1.0:
            position = position * constant(self.rope.scale, lanes)
        position = temp(position, lanes)
        at = [(element, column), (element + self.half // ops.values_per_element, column)]
        before = [ops.unpack(load(*k(*i), lanes, ops.dtype)) for i in at]
        after = [[], []]
        for n, (x, y) in enumerate(zip(*before, strict=True)):
            frequency = self.frequencies[element * ops.values_per_element + n]
            rotation = sin_cos(position * broadcast(frequency, lanes), lanes, simd)
            sin, cos = (
                temp(value * constant(factor, lanes), lanes) if factor != 1.0 else value
                for value in (rotation.sin, rotation.cos)
            )
            after[0].append(temp(x * cos - y * sin, lanes))
            after[1].append(temp(y * cos + x * sin, lanes))
        for i, numbers in zip(at, after, strict=True):
            store(*k(*i), lanes, ops.repack(numbers), ops.dtype)


class NoRotation:
    """Stands in for `InlineRope` over latent rows, which models rotate themselves."""

    restores = rotates_q = rotates_k = False

    def begin_task(self) -> None:
        """Nothing to make."""

    def begin_sequence(self, length) -> None:
        """Nothing to know of a sequence."""

    def restore(self, o, row) -> None:
        """Nothing to restore."""


@T.meta_class
class HadamardRotation:
    """Stands in for `InlineRope`: rows of Q are multiplied where K was, those of K never.

    Parameters
    ----------
    spec : KernelSpec
        With a codec that has Hadamard matrices.
    a : the kernel's arguments; a call with `rotary_mode` 1 is refused.
    """

    def __init__(self, spec: KernelSpec, a):
        self.spec, self.lanes = spec, spec.target.lanes
        self.rotates_q, self.rotates_k = spec.codec.k.has_hadamard, False
        self.restores = spec.codec.v.has_hadamard  # rows of O are multiplied when they are complete
        refuse_inline(spec, a)

    def begin_task(self) -> None:
        """Make the buffers of a task."""
        self.row = T.alloc_buffer((-(-self.spec.qk_head_dim // 32) * 32,), F32)

    def begin_sequence(self, length) -> None:
        """Nothing to know of a sequence."""

    def set_position(self, position) -> None:
        """All positions have the same matrix."""

    def begin_row(self, token, position) -> None:
        """As `set_position`, for a row of Q."""

    def rotate(self, source: Callable) -> None:
        """Multiply a row of Q, ``source(column, lanes) -> vector``, into `row`."""
        store_row(self.row, (), self.spec.qk_head_dim, self.lanes, source)
        transform(self.row, (), k_parts(self.spec), self.lanes)

    def restore(self, o, row) -> None:
        """Multiply a row of sums of V back, if V was multiplied."""
        if not self.restores:
            return
        transform(o, (row,), v_parts(self.spec), self.lanes)


def rotation_of(spec: KernelSpec, a: AttentionInputs) -> InlineRope | HadamardRotation | NoRotation:
    """Choose by the spec and by where K lies."""
    if isinstance(a, PagedInputs) and spec.codec and spec.codec.has_hadamard:
        return HadamardRotation(spec, a)
    return NoRotation() if spec.is_latent else InlineRope(spec, a)
