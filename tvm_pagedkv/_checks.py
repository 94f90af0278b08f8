# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Each error names the argument, the expected values and the actual one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

MAX_HEAD_DIM = 576


def check_int(name: str, value: Any, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """Return `value` as an int if it is an integer in ``[minimum, maximum]``; else raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not minimum <= int(value) <= maximum:
        raise ValueError(f"{name} must be between {minimum} and {maximum}, got {value}")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`; else raise a ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def check_positive(name: str, value: Any) -> float:
    """Return `value` as a float if it is positive and finite; else raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return number


def check_head_dim(name: str, value: Any) -> int:
    """Return `value` if kernels support it as a head dimension; else raise."""
    value = check_int(name, value, 8, MAX_HEAD_DIM)
    if value % 8:
        raise ValueError(f"{name} must be a multiple of 8, got {value}")
    return value


def freeze(value: Any) -> Any:
    """Return a hashable copy: mappings become sorted pairs, lists become tuples."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), freeze(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value
