# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Each error names the argument, the expected values and the actual one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any


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
