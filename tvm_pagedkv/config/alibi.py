# SPDX-License-Identifier: Apache-2.0
"""ALiBi slopes: the standard ones, or those of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


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


def freeze_slopes(
    name: str, alibi: bool | Sequence[float] | None
) -> bool | tuple[float, ...] | None:
    """Return a setting that can be hashed: slopes become a tuple of floats.

    Raises
    ------
    ValueError, TypeError
        If the setting is neither a bool nor finite numbers; the message calls it `name`.
    """
    if alibi is None or isinstance(alibi, bool):
        return alibi
    try:
        slopes = tuple(float(slope) for slope in alibi)
    except TypeError:
        raise TypeError(f"{name} must be True or a sequence of slopes, got {alibi!r}") from None
    if not all(map(math.isfinite, slopes)):
        raise ValueError(f"{name} must be finite, got {slopes}")
    return slopes


def resolve_slopes(
    name: str, alibi: Literal[True] | Sequence[float], num_heads: int
) -> tuple[float, ...]:
    """Return one slope per head: the standard ones for True.

    Raises
    ------
    ValueError
        If the number of slopes differs from that of heads; the message calls them `name`.
    """
    if alibi is True:
        return standard_slopes(num_heads)
    if len(alibi) != num_heads:
        raise ValueError(f"{name} needs a slope for each of {num_heads} heads, got {len(alibi)}")
    return tuple(alibi)
