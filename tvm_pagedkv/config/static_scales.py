# SPDX-License-Identifier: Apache-2.0
"""Static scales of K and V, which a checkpoint has, in place of scales that each row chooses."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

Scales = tuple[float | tuple[float, ...], float | tuple[float, ...]]
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def freeze_scales(name: str, value: Any) -> Scales:
    """Return scales of K and of V, a number or one for each head, as hashable numbers of float32.

    Raises
    ------
    ValueError, TypeError
        If they are not two, or one is no positive normal number of float32.
    """
    pair = _listed(value)
    if pair is None or len(pair) != 2:
        raise TypeError(f"{name} must be scales of K and of V, a pair, got {value!r}")
    k, v = (_frozen(name, each) for each in pair)
    return k, v


def resolve_scales(name: str, scales: Scales, num_heads: int) -> tuple[tuple[float, ...], ...]:
    """Return a scale of K, and of V, for each head; a ValueError if there are more or fewer."""
    resolved = []
    for each in scales:
        of_heads = each if isinstance(each, tuple) else (each,) * num_heads
        if len(of_heads) != num_heads:
            raise ValueError(
                f"{name} has {len(of_heads)} scales for {num_heads} KV heads: it must be one, or "
                "one for each head"
            )
        resolved.append(of_heads)
    return tuple(resolved)


def _frozen(name: str, value: Any) -> float | tuple[float, ...]:
    if _is_number(value):
        return _checked(name, value)
    of_heads = _listed(value)
    if not of_heads or not all(_is_number(x) for x in of_heads):
        raise TypeError(f"{name} must be numbers, or sequences of numbers, got {value!r}")
    return tuple(_checked(name, x) for x in of_heads)


def _checked(name: str, value: Any) -> float:
    if not _SMALLEST_NORMAL <= value <= _LARGEST:
        raise ValueError(f"{name} must be positive numbers of float32, got {value}")
    return float(np.float32(float(value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _listed(value: Any) -> list | tuple | None:
    """Return a list, a tuple or an array with dimensions as a sequence; None for all else."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value.tolist()
    return value if isinstance(value, (list, tuple)) else None
