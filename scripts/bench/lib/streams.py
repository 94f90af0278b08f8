# SPDX-License-Identifier: Apache-2.0
"""The least time in which this machine moves some bytes: plain loops over arrays of that size.

A kernel that moves bytes is compared with a loop that reads and writes as many, through as many
arrays, which therefore lie in the same caches: no share of one limit for all sizes means anything
where caches are several times as fast as memory. The loops are compiled as the kernels are and run
in the same pool; the fastest counts, of one thread and all, of stores that pass through the caches
and stores that go around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import constant, load, store
from tir_kernels.cpu.tasks import TASKS
from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv.threads import num_threads

VECTORS = 4  # of a step
# Bytes of each array for one byte moved.
SIZES = {"copy": (1 / 2, 1 / 2), "add": (1 / 3, 1 / 3), "scale": (1 / 2,)}

_STORE_AROUND = """
define linkonce_odr void @bench_store_around(ptr %to, <{n} x float> %value) #0 {{
  store <{n} x float> %value, ptr %to, align {bytes}, !nontemporal !0
  ret void
}}
attributes #0 = {{ alwaysinline nounwind }}
!0 = !{{i32 1}}
"""


def _emit(arrays: list, tasks, lanes: int, value: Callable, around: bool) -> None:
    """``sink = value(sources)`` by vectors, the last of the arrays being the sink."""
    sink, rows = arrays[-1], arrays[0].shape[0]

    def move(task):
        begin, end = (rows * T.cast(task + i, "int64") // T.cast(tasks, "int64") for i in range(2))
        with T.serial(end - begin) as i:
            for column in range(0, VECTORS * lanes, lanes):
                at = (begin + i, column)
                result = value([load(array, at, lanes) for array in arrays])
                if around:
                    address = T.address_of(sink[at])
                    T.evaluate(T.call_extern("void", "bench_store_around", address, result))
                else:
                    store(sink, at, lanes, result)

    with T.parallel(tasks, annotations=TASKS) as task:
        move(task)


class Streams:
    """Loops "copy" (``b = a``), "add" (``b = a + b``) and "scale" (``a = a * c``)."""

    def __init__(self):
        lanes = vector_target().lanes
        width = VECTORS * lanes
        helper = _STORE_AROUND.format(n=lanes, bytes=4 * lanes)

        def of_two(name: str, value: Callable, around: bool):
            @T.prim_func(s_tir=True)
            def loop(source_handle: T.handle, sink_handle: T.handle, tasks: T.int32):
                T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
                rows = T.int64()
                source = T.match_buffer(source_handle, (rows, width), "float32")
                sink = T.match_buffer(sink_handle, (rows, width), "float32")
                with T.attr(T.int32(0), "pragma_import_llvm", helper):
                    _emit([source, sink], tasks, lanes, value, around)

            return loop.with_attr("global_symbol", name)

        @T.prim_func(s_tir=True)
        def scale(array_handle: T.handle, tasks: T.int32):
            T.func_attr({"tirx.is_scheduled": True, "global_symbol": "scale"})
            rows = T.int64()
            array = T.match_buffer(array_handle, (rows, width), "float32")
            _emit([array], tasks, lanes, lambda x: x[0] * constant(0.99999, lanes), False)

        functions = {
            "copy": of_two("copy", lambda x: x[0], False),
            "copy around": of_two("copy_around", lambda x: x[0], True),
            "add": of_two("add", lambda x: x[0] + x[1], False),
            "scale": scale,
        }
        built = tvm.tirx.build(
            tvm.IRModule({f.attrs["global_symbol"]: f for f in functions.values()}),
            target=resolve_target(),
        )
        self._loops = {k: built[f.attrs["global_symbol"]] for k, f in functions.items()}
        self._row_bytes = 4 * width

    def runs(
        self, kind: str, num_bytes: int, on_one_thread: bool, num_calls: int = 1
    ) -> list[Callable]:
        """The loops of a kind over arrays of `num_bytes` in all moved, to be timed.

        Each moves its part in every one of `num_calls` calls.
        """
        arrays = self._arrays([num_bytes * part for part in SIZES[kind]], num_calls)
        threads = (1,) if on_one_thread else sorted({1, num_threads()})
        names = [name for name in self._loops if name.startswith(kind)]

        def run(loop: Callable, tasks: int) -> None:
            for parts in arrays:
                loop(*parts, tasks)

        return [
            functools.partial(run, self._loops[name], tasks) for name in names for tasks in threads
        ]

    def _arrays(self, sizes: list[float], num_calls: int) -> list[tuple]:
        """Arrays of about these sizes, each half a page away from where the last one begins.

        (A load waits for a store before it whose address has the same last twelve bits.) They are
        cut for each call.
        """
        counts = [max(1, round(size / self._row_bytes)) for size in sizes]
        starts = np.cumsum([0, *(-(-n * self._row_bytes // 4096) * 4096 + 2048 for n in counts)])
        memory = np.ones(starts[-1] // 4 + 1024, np.float32).view(np.uint8)
        starts += -memory.ctypes.data % 4096
        arrays = [
            memory[start : start + n * self._row_bytes].view(np.float32).reshape(n, -1)
            for start, n in zip(starts[:-1], counts, strict=True)
        ]
        parts = [np.array_split(array, min(num_calls, *counts)) for array in arrays]
        return [tuple(map(tvm.runtime.from_dlpack, call)) for call in zip(*parts, strict=True)]
