# SPDX-License-Identifier: Apache-2.0
"""Barriers, and exchange among the threads of a warp, all of which take part."""

from __future__ import annotations

from tvm.script import tirx as T

from ..gpu.registers import WARP
from .ptx import ptx

_ALL = 0xFFFFFFFF


def sync_block() -> None:
    """Emit a barrier of all threads of a block."""
    T.evaluate(T.cuda.cta_sync())


def sync_block_and_copies() -> None:
    """Emit a barrier of a block after which matrix instructions see what it stored or copied.

    They read shared memory by another way than loads and stores, the "async proxy" of the PTX ISA.
    """
    ptx("fence.proxy.async.shared::cta")
    sync_block()


def sync_warp() -> None:
    """Emit a barrier of all threads of a warp."""
    T.evaluate(T.cuda.warp_sync())


def any_of(condition):
    """Return whether the condition holds in any lane."""
    return T.cuda.any_sync(T.uint32(_ALL), T.cast(condition, "int32")) != 0


def shuffle_up(value, distance: int):
    """Return the value of the lane `distance` before."""
    return T.tvm_warp_shuffle_up(T.uint32(_ALL), value, distance, WARP, WARP)


def shuffle_from(value, lane):
    """Return the value of a lane."""
    return T.tvm_warp_shuffle(T.uint32(_ALL), value, lane, WARP, WARP)


def in_all_lanes(value):
    """Return a value that all lanes have: so the compiler, too, knows that they are equal."""
    return shuffle_from(value, 0)


def shuffle_xor(value, mask: int):
    """Return the value of the lane whose number differs in the bits of `mask`."""
    return T.tvm_warp_shuffle_xor(T.uint32(_ALL), value, mask, WARP, WARP)
