# SPDX-License-Identifier: Apache-2.0
"""The scratch memory that kernels for CPUs borrow from a cache, computed before they run.

The cache lends its n-th block to the n-th request of a kernel that is not given back yet, and a
block is as large as its largest request: `runtime_ext/step/scratch.h`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Var
from tvm.target import Target

import tir_kernels
from tir_kernels.cpu.rows import page_schedule
from tir_kernels.cpu.tasks import ALLOCATE, RELEASE, Splits
from tir_kernels.cpu.tiles import tile_splits
from tir_kernels.releases import TensorLoad, buffer_of

from ..config import KVCacheConfig
from .build import spec_sets
from .targets import resolve_target
from .tasks import num_heap_bytes, share_task_body

_PAGE = 4096  # sizes of blocks are multiples of it


def scratch_bytes(
    config: KVCacheConfig,
    target: Target | str | Mapping | None = None,
    num_threads: int | None = None,
) -> int:
    """Return the most bytes that kernels for a CPU borrow from a cache, without making one.

    The first steps allocate them beside `KVCacheConfig.memory_bytes`, and the cache keeps them as
    ``scratch_bytes`` of `KVCache.stats`. They grow with the number of threads: each has tiles of Q,
    K and V, and partial states. Kernels are built for this, which takes a second, but not compiled.

    The lists of a call decide what attention to lists and the choice of these take, which comes on
    top. So do token trees of more than `prefill_chunk_size` nodes.

    Parameters
    ----------
    config : KVCacheConfig
    target : str, mapping or tvm.target.Target, optional
        A CPU, as `create` takes it. What kernels borrow on a GPU depends on the GPU, and
        ``scratch_bytes`` of `KVCache.stats` tells it after some steps.
    num_threads : int, optional
        Threads that kernels use; None: those of this thread.

    Raises
    ------
    ValueError
        For a target other than a CPU, or a number of threads that is not positive.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads must be positive, got {num_threads}")
    resolved = config.resolved()
    threads = num_threads or tvm_ffi.get_global_func("runtime.NumThreads")()
    most = {  # by the ends of the names of variables
        "num_tasks": threads,
        "rounds": Splits.ROUNDS,
        "num_rows": resolved.prefill_chunk_size,
        "num_nodes": resolved.prefill_chunk_size,
    }
    for name, splits, cuts in (
        ("num_slots", Splits.ROUNDS * threads, page_schedule),
        ("num_tile_slots", threads, tile_splits),
    ):
        # A split has a slot, and others for the segments with which it goes on with a sequence.
        segments = -(-resolved.max_total_tokens // cuts.SEGMENT)
        most[name] = splits * min(segments, cuts.MAX_SEGMENTS)
    blocks: list[int] = []
    for spec in spec_sets(resolved, resolve_target(target)).specs:
        for name in tir_kernels.kernel_names(spec):
            sizes = [_most_of_block(requests, most) for requests in _requests(name, spec)]
            known = [size for size in sizes if size is not None]
            if len(known) == len(sizes):  # lists decide about the others
                pairs = itertools.zip_longest(blocks, known, fillvalue=0)
                blocks = [max(pair) for pair in pairs]
    return sum(-(-num_bytes // _PAGE) * _PAGE for num_bytes in blocks)


@functools.lru_cache(maxsize=1024)
def _requests(name: str, spec: Any) -> list[list]:
    """Return the requests of a kernel that each block serves: sizes in bytes, expressions."""
    kernel = next(iter(share_task_body(tir_kernels.build_kernel(name, spec), name).values()))
    requests: list[list] = []
    borrowers: list[Var | None] = []  # of the blocks

    def borrow(data: Var, size: Any) -> None:
        if None not in borrowers:
            borrowers.append(None)
            requests.append([])
        block = borrowers.index(None)
        borrowers[block] = data
        requests[block].append(size)

    def bind(statement: tirx.Bind) -> None:
        if _calls(statement.value, ALLOCATE):
            borrow(statement.var, statement.value.args[3])

    def allocate(statement: tirx.AllocBuffer) -> None:
        buffer = statement.buffer.ty
        if num_heap_bytes(statement.buffer):
            borrow(statement.buffer, tirx.const(num_heap_bytes(statement.buffer), "int64"))
        elif not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            borrow(statement.buffer, math.prod(buffer.shape, start=tirx.const(4, "int64")))

    def evaluate(statement: tirx.Evaluate) -> None:
        if _calls(statement.value, RELEASE):
            data = statement.value.args[3]
            borrowers[next(i for i, other in enumerate(borrowers) if data.same_as(other))] = None

    callbacks = [(tirx.Bind, bind), (tirx.AllocBuffer, allocate), (tirx.Evaluate, evaluate)]
    tvm_ffi.structural_walk(kernel.body, callbacks)
    return requests


def _calls(value: Any, name: str) -> bool:
    """Whether an expression is a call of a C function."""
    callee = value.args[0] if isinstance(value, Call) and len(value.args) > 0 else None
    return getattr(callee, "value", None) == name


def _most_of_block(requests: list, most: Mapping[str, int]) -> int | None:
    sizes = [_most_of(size, most) for size in requests]
    return None if None in sizes else max(size or 0 for size in sizes)


def _most_of(size: Any, most: Mapping[str, int]) -> int | None:
    """Evaluate a size with the largest values of variables; None if it depends on others."""
    if isinstance(size, tirx.IntImm):
        return int(size)
    if isinstance(size, tirx.Cast):
        return _most_of(size.value, most)
    if isinstance(size, (tirx.Add, tirx.Mul)):
        a, b = _most_of(size.a, most), _most_of(size.b, most)
        if a is None or b is None:
            return None
        return a + b if isinstance(size, tirx.Add) else a * b
    if isinstance(size, TensorLoad):
        size = buffer_of(size)
    if not isinstance(size, Var):
        return None
    return next((value for name, value in most.items() if size.name.endswith(name)), None)
