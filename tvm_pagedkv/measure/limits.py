# SPDX-License-Identifier: Apache-2.0
"""Limits of the machine, measured with kernels of the same compiler and thread pool."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tvm
from tvm.script import tirx as T

import tir_kernels
from tir_kernels.cpu.isa.bf16 import LLVM_HELPERS, PairOperands
from tir_kernels.cpu.isa.matrices import amx
from tir_kernels.cpu.isa.simd import Register, constant, import_llvm, load, store, temp

from .._huge_pages import huge_zeros
from ..compiler import cached_library, code_versions, compiling, resolve_target, vector_target
from ..threads import num_threads

_SOURCES = (Path(__file__), Path(tir_kernels.__file__).parent)
READ_BYTES = 2**28
REGISTERS = 12  # accumulators of the FMA loop: enough to hide its latency
FMA_STEPS = 200_000
TILE_STEPS = 20_000  # of four products each
TILE_FLOPS = 2 * amx.SIDE * amx.SIDE * 2 * amx.SIDE  # of a product


def _emit_read(source, sink, tasks: int, lanes: int) -> None:
    rows = int(source.shape[1])
    with T.parallel(tasks) as task:
        total = [Register(lanes, init=constant(0.0, lanes)) for _ in range(REGISTERS)]
        with T.serial(rows) as row:
            for i, register in enumerate(total):
                register.set(register.get() + load(source, (task, row, i * lanes), lanes))
        for register in total[1:]:
            total[0].set(total[0].get() + register.get())
        store(sink, (task, 0), lanes, total[0].get())


def _emit_fma(sink, tasks: int, lanes: int) -> None:
    with T.parallel(tasks) as task:
        total = [
            Register(lanes, init=load(sink, (task, i * lanes), lanes)) for i in range(REGISTERS)
        ]
        x = Register(lanes, init=load(sink, (task, 0), lanes))
        with T.serial(FMA_STEPS):
            for register in total:
                register.set(register.get() * x.get() + x.get())
        for i, register in enumerate(total):
            store(sink, (task, i * lanes), lanes, register.get())


def _emit_dot(sink, words, tasks: int) -> None:
    operands, lanes = PairOperands(), PairOperands.lanes
    with T.attr(T.int32(0), "pragma_import_llvm", LLVM_HELPERS), T.parallel(tasks) as task:
        total = [
            Register(lanes, init=load(sink, (task, i * lanes), lanes)) for i in range(REGISTERS)
        ]
        x = temp(load(words, (task, 0), lanes, "int32"), lanes, "int32")
        with T.serial(FMA_STEPS):
            for register in total:
                register.set(operands.fma(register.get(), x, x, lanes))
        for i, register in enumerate(total):
            store(sink, (task, i * lanes), lanes, register.get())


def _emit_tiles(sink, tasks: int) -> None:
    """Multiply tiles whose rows are all the same one, for only the time matters."""
    tiles, same_row = amx.Tiles, 0
    with import_llvm(amx.LLVM_HELPERS), T.parallel(tasks) as task:
        tiles.begin()
        for tile in (*amx.A_TILES, *amx.B_TILES):
            tiles.load(tile, sink, (task, 0), same_row)
        for tile in range(amx.SUMS):
            tiles.zero(tile)
        with T.serial(TILE_STEPS):
            for tile in range(amx.SUMS):
                tiles.dot(tile)
        for tile in range(amx.SUMS):
            tiles.store(tile, sink, (task, tile * amx.SIDE), same_row)
        tiles.end()


def _compile(functions: dict, target: tvm.target.Target):
    with compiling("the measurements of the machine"):
        return tvm.tirx.build(tvm.IRModule(functions), target=target)


class Limits:
    """Measures the sequential read bandwidth and the FMA peak of all threads together.

    Where prefill and linear layers of bfloat16 take the dot product of pairs, or the tiles of AMX,
    it measures the peak of that as well.

    Attributes
    ----------
    read_times : list of float
        Seconds of every `read`, scaled to `READ_BYTES`.
    """

    def __init__(self):
        tasks, lanes = num_threads(), vector_target().lanes
        width = REGISTERS * lanes
        rows = READ_BYTES // (4 * width * tasks)

        @T.prim_func(s_tir=True)
        def read(source_handle: T.handle, sink_handle: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "global_symbol": "read"})
            source = T.match_buffer(source_handle, (tasks, rows, width), "float32")
            sink = T.match_buffer(sink_handle, (tasks, width), "float32")
            _emit_read(source, sink, tasks, lanes)

        @T.prim_func(s_tir=True)
        def fma(sink_handle: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "global_symbol": "fma"})
            sink = T.match_buffer(sink_handle, (tasks, width), "float32")
            _emit_fma(sink, tasks, lanes)

        @T.prim_func(s_tir=True)
        def dot(sink_handle: T.handle, words_handle: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "global_symbol": "dot"})
            sink = T.match_buffer(sink_handle, (tasks, width), "float32")
            words = T.match_buffer(words_handle, (tasks, width), "int32")
            _emit_dot(sink, words, tasks)

        @T.prim_func(s_tir=True)
        def tiles(sink_handle: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "global_symbol": "tiles"})
            sink = T.match_buffer(sink_handle, (tasks, width), "float32")
            _emit_tiles(sink, tasks)

        self.has_tiles = vector_target().has_amx
        self.has_dot = vector_target().multiplies_pairs
        functions = {"read": read, "fma": fma} | ({"dot": dot} if self.has_dot else {})
        functions |= {"tiles": tiles} if self.has_tiles else {}
        target = resolve_target()
        built = cached_library(
            [f"limits of {tasks} threads", *functions, *code_versions(*_SOURCES)],
            lambda: _compile(functions, target),
            target,
        )
        self._read, self._fma = built["read"], built["fma"]
        self._dot = built["dot"] if self.has_dot else None
        self._tiles = built["tiles"] if self.has_tiles else None
        self._words = tvm.runtime.tensor(np.zeros((tasks, width), np.int32))
        source, self._source = huge_zeros((tasks, rows, width), "float32")
        source.fill(1)
        self._sink = tvm.runtime.tensor(np.full((tasks, width), 0.5, np.float32))
        self.read_bytes = source.nbytes
        self.fma_flops = 2 * tasks * width * FMA_STEPS
        self.tile_flops = tasks * amx.SUMS * TILE_STEPS * TILE_FLOPS
        self.read_times: list[float] = []

    def read(self) -> float:
        """Read `read_bytes`, which also flushes the CPU caches; return bytes per second."""
        start = time.perf_counter()
        self._read(self._source, self._sink)
        self.read_times.append((time.perf_counter() - start) * READ_BYTES / self.read_bytes)
        return READ_BYTES / self.read_times[-1]

    def fma(self) -> float:
        """Return seconds per GFLOP of float32 FMA."""
        start = time.perf_counter()
        self._fma(self._sink)
        return (time.perf_counter() - start) * 1e9 / self.fma_flops

    def dot(self) -> float:
        """Return seconds per GFLOP of the dot product of bfloat16 pairs."""
        start = time.perf_counter()
        self._dot(self._sink, self._words)
        return (time.perf_counter() - start) * 1e9 / (2 * self.fma_flops)

    def tiles(self) -> float:
        """Return seconds per GFLOP of the tiles of AMX."""
        start = time.perf_counter()
        self._tiles(self._sink)
        return (time.perf_counter() - start) * 1e9 / self.tile_flops

    @property
    def read_bandwidth(self) -> float:
        """The bandwidth of the fastest read, in bytes per second."""
        return READ_BYTES / min(self.read_times)

    def peak(self, dtype: str) -> float:
        """Return the peak flops per second for `dtype`: the maximum of five measurements."""
        measure = self.fma
        if dtype == "bfloat16" and (self.has_tiles or self.has_dot):
            measure = self.tiles if self.has_tiles else self.dot
        return 1e9 / min(measure() for _ in range(5))
