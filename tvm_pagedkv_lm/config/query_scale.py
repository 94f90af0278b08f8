# SPDX-License-Identifier: Apache-2.0
"""`QueryScale`: a factor on Q by the position."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryScale:
    """A factor on Q by the position: ``1 + factor * log(1 + (position + offset) // floor)``.

    Parameters
    ----------
    floor : int
    factor : float
    offset : int
        What the first position counts as.
    """

    floor: int
    factor: float
    offset: int = 0
