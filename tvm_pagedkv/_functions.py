# SPDX-License-Identifier: Apache-2.0
"""The runtime's global functions, and the integers that they take."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi

STATE = "vm.builtin.kv_state_"
CACHE = "vm.builtin.attention_kv_cache_"


@functools.cache
def global_function(name: str) -> Callable[..., Any]:
    """Return the runtime's function of this name; raise a ValueError if there is none."""
    return tvm_ffi.get_global_func(name)


def as_int(name: str, value: Any) -> int:
    """Return an integer of any type as an int; raise a ValueError if it exceeds 64 bits."""
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


def as_shape(name: str, values: Sequence[int]) -> tvm_ffi.Shape:
    """Return integers of any type as a Shape; raise a ValueError if one exceeds 64 bits."""
    numbers = tuple(map(operator.index, values))
    try:
        return _shape_of(numbers)
    except ValueError:
        raise ValueError(f"{name} must fit into 64 bits, got {list(numbers)}") from None


# Making a Shape of 64 integers takes 25 us, and decode steps pass the same ones repeatedly.
_shape_of = functools.lru_cache(maxsize=64)(tvm_ffi.Shape)
