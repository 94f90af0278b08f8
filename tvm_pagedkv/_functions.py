# SPDX-License-Identifier: Apache-2.0
"""The runtime's global functions, and integers for them."""

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
    """Return the runtime's function of this name; a ValueError where there is none."""
    return tvm_ffi.get_global_func(name)


def as_int(name: str, value: Any) -> int:
    """An integer of any type; a ValueError where it does not fit into 64 bits."""
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


def as_shape(name: str, values: Sequence[int]) -> tvm_ffi.Shape:
    """Integers of any type; a ValueError where one does not fit into 64 bits."""
    numbers = tuple(map(operator.index, values))
    try:
        return _shape_of(numbers)
    except ValueError:
        raise ValueError(f"{name} must fit into 64 bits, got {list(numbers)}") from None


# Making a Shape of 64 numbers takes 25 us; decode steps have the same ones again and again.
_shape_of = functools.lru_cache(maxsize=64)(tvm_ffi.Shape)
