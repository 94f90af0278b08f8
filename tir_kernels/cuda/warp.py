# SPDX-License-Identifier: Apache-2.0
"""Exchange among the threads of a warp; all of them have to take part."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .emit import WARP, temp

_ALL = 0xFFFFFFFF


def any_of(condition):
    """Whether the condition holds in any lane: the same answer in all of them."""
    return T.cuda.any_sync(T.uint32(_ALL), T.cast(condition, "int32")) != 0


def shuffle_up(value, distance: int):
    """The value of the lane `distance` before."""
    return T.tvm_warp_shuffle_up(T.uint32(_ALL), value, distance, WARP, WARP)


def shuffle_from(value, lane):
    """The value of a lane."""
    return T.tvm_warp_shuffle(T.uint32(_ALL), value, lane, WARP, WARP)


def in_all_lanes(value):
    """An int32 value that all lanes have: so the compiler, too, knows that they have the same."""
    return shuffle_from(value, 0)


def shuffle_xor(value, mask: int):
    """The value of the lane whose number differs in the bits of `mask`."""
    return T.tvm_warp_shuffle_xor(T.uint32(_ALL), value, mask, WARP, WARP)


def over_lanes(value, combine: Callable, lanes: int = WARP):
    """Combine the values of so many lanes next to each other; all of them have the result."""
    value, mask = temp(value, 1, str(value.ty.dtype)), 1
    while mask < lanes:
        value = temp(combine(value, shuffle_xor(value, mask)), 1, str(value.ty.dtype))
        mask *= 2
    return value
