# SPDX-License-Identifier: Apache-2.0
"""The Hadamard matrices that rows of some codecs are multiplied with, to spread outliers.

K is multiplied before it is quantized, and Q when it is loaded: the matrix is orthogonal, so their
products stay. V is multiplied too; O is a weighted sum of its rows, and is multiplied back, by the
same matrix, which is its own inverse.

A part of a row, V or the columns behind it, is multiplied in blocks of the largest power of two
that divides its width: with the Sylvester matrix of that size over the root of the size.
"""

from __future__ import annotations

from ..spec import KernelSpec


def k_parts(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """Columns ``(begin, end)`` of Q and K whose blocks are multiplied apart."""
    if spec.v_head_dim == spec.qk_head_dim:
        return ((0, spec.qk_head_dim),)
    return ((0, spec.v_head_dim), (spec.v_head_dim, spec.qk_head_dim))


def v_parts(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """As `k_parts`, of V and O."""
    return ((0, spec.v_head_dim),)


def block_factor(width: int) -> float:
    """Return the factor that makes blocks of `width` columns of the 1 and -1 matrix orthogonal."""
    return block_size(width) ** -0.5


def block_size(width: int) -> int:
    """Rows of the matrix that the blocks of `width` columns are multiplied with."""
    return width & -width
