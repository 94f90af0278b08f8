# SPDX-License-Identifier: Apache-2.0
"""Rotation of Q and O where pages keep K and V multiplied with Hadamard matrices."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.hadamard import k_parts, v_parts
from ...semantics.rotary_mode import refuse_inline
from ...spec import KernelSpec
from ..isa.hadamard import transform
from ..isa.simd import F32, store_row


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
