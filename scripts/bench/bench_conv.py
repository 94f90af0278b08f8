#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions on the CPU beside reading and writing the same memory.

    python scripts/bench/bench_conv.py
    TVM_NUM_THREADS=2 python scripts/bench/bench_conv.py --channels 2048 --width 3 --activation none

Decode gives every sequence a row; its layers take turns, so that rows, pages and weights come from
memory. Prefill computes the rows of one sequence. The limit is a kernel that adds two arrays into a
third one: it reads and writes as many bytes. The two alternate.
"""

import argparse
import time

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels import build_kernel
from tir_kernels.conv_spec import ACTIVATIONS, ConvSpec
from tir_kernels.cpu.isa.simd import F32, load, store
from tir_kernels.cpu.tasks import TASKS
from tir_kernels.define import target_attributes
from tir_kernels.script import prim_func
from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv.compiler.lowering import compile_kernel
from tvm_pagedkv.measure import huge_zeros

BATCHES = (1, 8, 64)
PREFILL = 2048
ROUNDS = 7
LAYERS_BYTES = 2**28  # of all layers: more than the caches hold
ROWS_PER_SEQUENCE = 16  # of a layer's pages in decode


@prim_func
def add(var_x: T.handle, var_y: T.handle, var_out: T.handle, num_tasks: T.int32):
    """Read two arrays and write one: what a convolution cannot do faster."""
    T.func_attr(target_attributes(on_cpu=True))
    size = T.int64()
    x = T.match_buffer(var_x, (size,), F32)
    y = T.match_buffer(var_y, (size,), F32)
    out = T.match_buffer(var_out, (size,), F32)
    for task in T.parallel(num_tasks, annotations=TASKS):
        share = T.truncdiv(size, T.cast(num_tasks * 16, "int64"))
        for i in range(share):
            at = (share * T.cast(task, "int64") + i) * 16
            store(out, (at,), 16, load(x, (at,), 16) + load(y, (at,), 16))


def random_rows(rng, shape: tuple, dtype: str):
    """Return random rows in huge pages."""
    array, tensor = huge_zeros(shape, F32 if dtype == F32 else "uint16")
    array[:] = rng.standard_normal(shape, np.float32).astype(dtype).view(array.dtype)
    return tensor._create_view(shape, dtype, 0)


class Bench:
    """The kernel of a spec, and arrays for as many layers as the caches do not hold."""

    def __init__(self, spec: ConvSpec, num_threads: int):
        target = resolve_target()
        self.spec, self.num_threads = spec, num_threads
        self.conv = compile_kernel(build_kernel("causal_conv", spec), "conv", target)["conv"]
        self.add = compile_kernel(add, "add", target)["add"]
        self.rng = np.random.default_rng(0)

    def arguments(self, num_tokens: int, tap_slots: np.ndarray, num_pages: int) -> list:
        """Return the arguments of a layer's call."""
        spec, rng = self.spec, self.rng
        pages = random_rows(rng, (num_pages, spec.page_size, spec.channels), spec.dtype)
        weight = random_rows(rng, (spec.channels, spec.width), spec.dtype)
        bias = [random_rows(rng, (spec.channels,), spec.dtype)] if spec.has_bias else []
        x, out = (random_rows(rng, (num_tokens, spec.channels), spec.dtype) for _ in range(2))
        return [x, pages, tvm.runtime.tensor(np.int32(tap_slots)), weight, *bias, out]

    def compare(self, what: str, calls: list[list], num_bytes: int) -> None:
        """Print the time of calls that read and write so many bytes each."""
        size = num_bytes // 12 * len(calls)
        arrays = [huge_zeros((size,), F32)[1] for _ in range(3)]
        ours, limit = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for call in calls:
                self.conv(*call)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            self.add(*arrays, self.num_threads)
            limit.append(time.perf_counter() - start)
        total = num_bytes * len(calls)
        rate, peak = total / min(ours), 12 * size / min(limit)
        print(
            f"{what:22} {min(ours) / len(calls) * 1e6:8.1f} us  {rate / 1e9:6.1f} GB/s, "
            f"{rate / peak:4.0%} of reading and writing ({peak / 1e9:.1f})"
        )

    def decode(self, batch: int) -> None:
        """Print the rate of a row for each of some sequences."""
        spec = self.spec
        row_bytes = spec.channels * np.dtype(spec.dtype).itemsize
        num_bytes = row_bytes * (batch * (spec.width + 1) + spec.width)
        layers = max(1, LAYERS_BYTES // (num_bytes + batch * ROWS_PER_SEQUENCE * row_bytes))
        num_pages = -(-batch * ROWS_PER_SEQUENCE // spec.page_size)
        first = np.arange(batch)[:, None] * ROWS_PER_SEQUENCE
        slots = first + np.arange(spec.width - 1)
        calls = [self.arguments(batch, slots, num_pages) for _ in range(layers)]
        self.compare(f"decode {batch:3} sequences", calls, num_bytes)

    def prefill(self) -> None:
        """Print the rate of a sequence of many tokens: reads x and the pages, writes out."""
        spec = self.spec
        slots = np.arange(PREFILL)[:, None] - np.arange(spec.width - 1, 0, -1)
        call = self.arguments(PREFILL, np.maximum(slots, -1), -(-PREFILL // spec.page_size))
        num_bytes = 3 * PREFILL * spec.channels * np.dtype(spec.dtype).itemsize
        self.compare(f"prefill {PREFILL} tokens", [call], num_bytes)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--channels", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--activation", choices=(*ACTIVATIONS, "none"), default="silu")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    num_threads = int(tvm.get_global_func("runtime.NumThreads")())
    activation = None if options.activation == "none" else options.activation
    spec = ConvSpec(
        options.channels, options.width, options.dtype, activation, options.bias,
        target=vector_target(),
    )  # fmt: skip
    print(f"{spec}\n{num_threads} threads")
    bench = Bench(spec, num_threads)
    for batch in BATCHES:
        bench.decode(batch)
    bench.prefill()


if __name__ == "__main__":
    main()
