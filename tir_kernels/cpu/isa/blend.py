# SPDX-License-Identifier: Apache-2.0
"""Rows times weights, where a row of weight zero counts for nothing, whatever it holds."""

from __future__ import annotations

from ...semantics.partial_states import selected
from . import simd


def weighted(o, index, weight, lanes: int):
    """``o * weight``, and zero where the weight is zero, whatever o holds."""
    return selected(simd.temp(simd.load(o, index, lanes), lanes), weight, lanes, simd)
