# SPDX-License-Identifier: Apache-2.0
"""Slopes of ALiBi: the standard ones, or those of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence


def standard_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of Press, Smith and Lewis (2022), also where heads are no power of two.

    For a power of two they are a geometric sequence that starts at its ratio, ``2 ** (-8 / n)``.
    Other counts take those of the power below, then every other one of the power above.
    """
    power = 1 << (num_heads.bit_length() - 1)

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    return tuple(geometric(power) + geometric(2 * power)[::2][: num_heads - power])


def resolve_slopes(name: str, alibi: bool | Sequence[float], num_heads: int) -> tuple[float, ...]:
    """The slopes that a setting means for a number of heads: True, or one number per head.

    Raises
    ------
    ValueError, TypeError
        The message calls the setting `name`.
    """
    if alibi is True:
        return standard_slopes(num_heads)
    try:
        slopes = tuple(float(slope) for slope in alibi or ())
    except TypeError:
        raise TypeError(f"{name} must be True or a sequence of slopes, got {alibi!r}") from None
    if len(slopes) != num_heads:
        raise ValueError(f"{name} needs a slope for each of {num_heads} heads, got {len(slopes)}")
    if not all(map(math.isfinite, slopes)):
        raise ValueError(f"{name} must be finite, got {slopes}")
    return slopes
