# SPDX-License-Identifier: Apache-2.0
"""ALiBi slopes: the standard ones, or those of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence


def standard_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of Press, Smith and Lewis (2022), for any number of heads.

    For n heads, n a power of two, the slopes are a geometric sequence whose first term and ratio
    are ``2 ** (-8 / n)``. Otherwise they are the slopes for the next lower power of two, followed
    by every other slope for the next higher one.

    Source: "Train Short, Test Long", https://arxiv.org/abs/2108.12409, and its reference code.
    """
    power = 1 << (num_heads.bit_length() - 1)

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    return tuple(geometric(power) + geometric(2 * power)[::2][: num_heads - power])


def resolve_slopes(name: str, alibi: bool | Sequence[float], num_heads: int) -> tuple[float, ...]:
    """Return the slopes of a setting: the standard ones for True, or one number per head.

    Raises
    ------
    ValueError, TypeError
        If the setting is neither; the message calls it `name`.
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
