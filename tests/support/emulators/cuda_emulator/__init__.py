# SPDX-License-Identifier: Apache-2.0
"""Generated CUDA C++ on the CPU: a thread of a block is a fiber, an instruction a C++ function.

The launcher that ships is the one that runs. Threads take turns where they wait, in an order that a
`Schedule` chooses, and asynchronous copies land as late, or as early, as they may: a wait that is
missing shows as a wrong result under one schedule or another. A barrier that is missing is an
error: a thread reads what another one wrote to shared memory, or writes what another one read or
wrote, and no barrier orders the two. Writes of the same value race with nothing, and what a matrix
instruction reads in a race is NaN, as it may read more than it uses. Shared memory holds NaN when a
block begins. A kernel that may begin before the one before has ended does, and runs until it waits
for it. Not modelled: the memory model beyond that, bank conflicts, time.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import tvm_ffi

from .library import load, runtime
from .translate import translate

_ORDERS = ("in turn", "shuffled", "skewed")


@dataclass(frozen=True)
class Schedule:
    """The order in which threads run.

    Parameters
    ----------
    order : {"in turn", "shuffled", "skewed"}
        "skewed": one warp runs as far ahead of the others as it can. Blocks are shuffled too,
        unless in turn.
    eager : bool
        Asynchronous copies land at once, and products of warpgroups too unless the order is
        "skewed"; otherwise when they are waited for.
    seed : int
    """

    order: str = "in turn"
    eager: bool = False
    seed: int = 1

    def __str__(self) -> str:
        return self.order.replace(" ", "-") + ("-eager" if self.eager else "")


SCHEDULES = tuple(Schedule(order, eager) for order in _ORDERS for eager in (False, True))


@contextmanager
def schedule(chosen: Schedule):
    """Let what is launched within take turns as `chosen` says."""
    _set(chosen)
    try:
        yield
    finally:
        _set(Schedule())


def _set(chosen: Schedule) -> None:
    order = _ORDERS.index(chosen.order)
    runtime().emulator_set_schedule(order, int(chosen.eager), ctypes.c_uint(chosen.seed))


def is_right(check: Callable[[], object]) -> bool:
    """Whether a check passes, and the emulator finds no race in the kernels that it runs."""
    try:
        check()
    except AssertionError:
        return False
    except RuntimeError as error:
        if "shared memory: a race" not in str(error):
            raise
        return False
    return True


def wrong_schedules(check: Callable[[], object]) -> list[str]:
    """The schedules under which a check is not right."""
    wrong = []
    for chosen in SCHEDULES:
        with schedule(chosen):
            if not is_right(check):
                wrong.append(str(chosen))
    return wrong


@contextmanager
def multiprocessors(count: int):
    """Let the device have so many multiprocessors."""
    runtime().emulator_set_multiprocessors(count)
    try:
        yield
    finally:
        runtime().emulator_set_multiprocessors(0)


@contextmanager
def block_shared_bytes(num_bytes: int):
    """Let blocks have at most so many bytes of shared memory, 227 KB or less."""
    runtime().emulator_set_block_shared_bytes(ctypes.c_int64(num_bytes))
    try:
        yield
    finally:
        runtime().emulator_set_block_shared_bytes(ctypes.c_int64(0))


@contextmanager
def ptx_version(version: int):
    """Let the code of libraries be made of such PTX. A library asks its device once."""
    runtime().emulator_set_ptx_version(version)
    try:
        yield
    finally:
        runtime().emulator_set_ptx_version(0)


@contextmanager
def capturing():
    """Let streams say that a CUDA graph is captured; kernels run nevertheless."""
    runtime().emulator_set_capturing(1)
    try:
        yield
    finally:
        runtime().emulator_set_capturing(0)


def take_num_pool_blocks() -> int:
    """Return how many blocks were taken from memory pools since the last call."""
    return runtime().emulator_take_num_pool_blocks()


@contextmanager
def overlapping():
    """Let kernels begin before those of the function called before have ended.

    Those of one function always do. What was called within has run when it ends.
    """
    runtime().emulator_let_launchers_overlap(1)
    fault = None
    try:
        yield
    finally:
        fault = runtime().emulator_let_launchers_overlap(0)
    if fault:
        raise RuntimeError(fault.decode())


@dataclass(frozen=True)
class Launch:
    """One launch: blocks of the grid, threads per block, and shared memory per block.

    Also how many bytes each block copied asynchronously from global memory.

    Parameters
    ----------
    begins_early : bool
        Blocks may be there before the kernel before has ended.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    begins_early: bool
    copied_bytes: tuple[int, ...] = field(default=(), compare=False)


@contextmanager
def launches():
    """A list that is filled with the launches made within, when it ends."""
    made: list[Launch] = []
    runtime().emulator_clear_launches()
    yield made
    values = (ctypes.c_int64 * 6)()
    while runtime().emulator_launch(len(made), values):
        grid = tuple(values[:3])
        copied = runtime().emulator_copied_bytes
        of_blocks = [copied(len(made), ctypes.c_int64(i)) for i in range(math.prod(grid))]
        made.append(Launch(grid, *values[3:5], bool(values[5]), tuple(of_blocks)))


@functools.lru_cache(maxsize=128)
def emulated(source: str) -> tvm_ffi.Module:
    """Functions, by the names of the PrimFuncs, that take tensors on the CPU.

    Parameters
    ----------
    source : str
        What ``tvm.backend.cuda.export_cuda_host`` returns.
    """
    return load(translate(source))


def counting_loads(source: str, argument: str) -> str:
    """Source whose kernels count what they read of an argument, for `num_loads`."""
    return mutated(source, f" {argument}_ptr[", f" emulator::Counted({argument}_ptr)[")


def num_loads() -> int:
    """Return the number of loads since the last call."""
    return runtime().emulator_take_num_loads()


def mutated(source: str, old: str, new: str = "", which: int | None = None) -> str:
    """Source with a part replaced, for tests that see the emulator catch it.

    Parameters
    ----------
    which : int, optional
        Replace this occurrence of `old` only; None: all.

    Raises
    ------
    ValueError
        When there is no such part.
    """
    parts = source.split(old)
    places = range(len(parts) - 1) if which is None else [which]
    if len(parts) <= max(places, default=0) + 1:
        raise ValueError(f"there is no {old!r} number {which or 0} in the source")
    kept = [new if i in places else old for i in range(len(parts) - 1)]
    return parts[0] + "".join(k + part for k, part in zip(kept, parts[1:], strict=True))
