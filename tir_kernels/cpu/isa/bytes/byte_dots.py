# SPDX-License-Identifier: Apache-2.0
"""Byte dot products: four products of bytes are added to each int32 of a vector."""

from __future__ import annotations

from ....spec import VectorTarget
from ..neon.dots import MatrixDots, SignedDots
from .vnni import UnsignedDots


def byte_dots(target: VectorTarget) -> SignedDots | UnsignedDots | None:
    """Return the byte dot products of a target, or None if it has none."""
    if target.has_vnni:
        return UnsignedDots()
    if target.has_smmla:
        return MatrixDots()
    return SignedDots() if target.has_sdot else None
