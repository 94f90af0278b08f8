#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on the CPU: decode beside reading and writing memory, prefill beside the peak.

    python scripts/bench/bench_recurrent.py
    TVM_NUM_THREADS=2 python scripts/bench/bench_recurrent.py --rule kda --heads 32 --dims 128 128
    python scripts/bench/bench_recurrent.py --torch   # beside what transformers runs on CPUs
    python scripts/bench/bench_recurrent.py --ik-llama DIR   # beside ik_llama.cpp, of sources there

Decode updates every state of a pool once. Its limit is a kernel that scales the pool in place; the
two alternate. Prefill processes the tokens of one sequence. For each token and element of a state,
the recurrence takes one multiplication and three multiply-adds (two without a delta rule; one less
where a token is replayed). The limit is the CPU's peak of float32 multiply-adds.
"""

import argparse
import time

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import F32, broadcast, load, store
from tir_kernels.cpu.recurrent.scan import recurrent_scan
from tir_kernels.cpu.tasks import TASKS
from tir_kernels.define import target_attributes
from tir_kernels.moves.recurrent import recurrent_append
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tir_kernels.script import prim_func
from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv.compiler.lowering import compile_kernel
from tvm_pagedkv.measure import huge_zeros
from tvm_pagedkv.measure.limits import Limits

BATCHES = (1, 8, 64)
ROUNDS = 7
REPLAYED = 170  # tokens between a checkpoint and a fork, say
ROWS_ARGUMENT = 6  # of the kernel


@prim_func
def scale_in_place(var_x: T.handle, factor: T.float32, num_tasks: T.int32):
    """Read and write an array: what decode cannot do faster."""
    T.func_attr(target_attributes(on_cpu=True))
    size = T.int64()
    x = T.match_buffer(var_x, (size,), F32)
    for task in T.parallel(num_tasks, annotations=TASKS):
        share = T.truncdiv(size, T.cast(num_tasks * 16, "int64"))
        for i in range(share):
            at = (share * T.cast(task, "int64") + i) * 16
            store(x, (at,), 16, load(x, (at,), 16) * broadcast(factor, 16))


class Bench:
    """The kernels of a spec, and a pool of states larger than the caches."""

    def __init__(self, spec: RecurrentSpec, num_threads: int):
        target = resolve_target()
        self.spec, self.num_threads = spec, num_threads
        self.scan = compile_kernel(recurrent_scan(spec), "scan", target)["scan"]
        self.append = compile_kernel(recurrent_append(spec), "append", target)["append"]
        self.scale = compile_kernel(scale_in_place, "scale", target)["scale"]
        self.state_bytes = spec.state_bytes
        self.num_states = max(64, 2**28 // self.state_bytes)
        shape = (self.num_states, spec.num_heads, spec.key_dim, spec.value_dim)
        self.array, self.states = huge_zeros(shape, spec.state_dtype)
        self.rng = np.random.default_rng(0)

    def arguments(self, num_rows: int, pages: list[int]) -> list:
        """Return the arguments of a call for sequences of `num_rows` tokens each."""
        spec, rng = self.spec, self.rng
        total = num_rows * len(pages)

        def normal(*shape):
            return rng.standard_normal(shape, np.float32).astype(spec.dtype)

        k = normal(total, spec.num_key_heads, spec.key_dim)
        k = (k / np.linalg.norm(k.astype(F32), axis=-1, keepdims=True)).astype(spec.dtype)
        q, v = normal(*k.shape), normal(total, spec.num_heads, spec.value_dim)
        gates = [-rng.random((total, *spec.sections["log_decay"].shape), np.float32)]
        if spec.is_delta:
            gates.append(rng.random((total, spec.num_heads), np.float32))
        slots, rows = (np.arange(total, dtype=np.int32) for _ in range(2))
        num_pages = -(-total // spec.page_size)
        kept = np.zeros((num_pages, spec.page_size, spec.row_width), spec.dtype)
        kept = tvm.runtime.tensor(kept)
        self.append(*map(tvm.runtime.tensor, (k, v, *gates, slots)), kept)
        tables = [
            np.arange(len(pages) + 1, dtype=np.int32),
            np.arange(len(pages) + 1, dtype=np.int32) * np.int32(num_rows),
            slots,
            rows,
            np.int32(pages),
            np.int32(pages),
            np.zeros_like(v),
        ]
        tensors = [tvm.runtime.tensor(x) for x in tables]
        return [tvm.runtime.tensor(q), kept, self.states, *tensors, 1.0]

    def decode(self, batch: int) -> None:
        """Print the rate of decode steps over all states, a batch at a time."""
        steps = [
            self.arguments(1, list(range(first, first + batch)))
            for first in range(0, self.num_states - batch + 1, batch)
        ]
        moved = 2 * self.state_bytes * batch * len(steps)
        flat = self.states._create_view((self.array.nbytes // 4,), F32, 0)
        ours, limit = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for step in steps:
                self.scan(*step)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            self.scale(flat, 1.0, self.num_threads)
            limit.append(time.perf_counter() - start)
        rate, peak = moved / min(ours), 2 * self.array.nbytes / min(limit)
        print(
            f"decode {batch:3} sequences  {min(ours) / len(steps) * 1e6:8.1f} us  "
            f"{rate / 1e9:6.1f} GB/s, {rate / peak:4.0%} of reading and writing ({peak / 1e9:.1f})"
        )

    def prefill(self, num_rows: int, peak: float, *, is_replay: bool = False) -> None:
        """Print the rate of a sequence of many tokens."""
        spec, call = self.spec, self.arguments(num_rows, [0])
        if is_replay:
            call[ROWS_ARGUMENT] = tvm.runtime.tensor(np.full(num_rows, -1, np.int32))
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            self.scan(*call)
            times.append(time.perf_counter() - start)
        elements = num_rows * spec.num_heads * spec.key_dim * spec.value_dim
        operations = 1 + 2 * (1 + spec.is_delta + (not is_replay))
        rate = elements * operations / min(times)
        print(
            f"{'replay' if is_replay else 'prefill'} {num_rows:5} tokens    "
            f"{min(times) * 1e3:8.2f} ms  "
            f"{rate / 1e9:6.1f} GFLOP/s, {rate / peak:4.0%} of multiply-adds ({peak / 1e9:.0f})"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rule", choices=RULES, default="gated_delta")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dims", type=int, nargs=2, default=(128, 128), metavar=("KEY", "VALUE"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--state-dtype", default=F32)
    parser.add_argument("--torch", action="store_true", help="of gated_delta: beside transformers")
    parser.add_argument("--ik-llama", metavar="DIR", help="the same: beside that of ik_llama.cpp")
    options = parser.parse_args()
    num_threads = int(tvm.get_global_func("runtime.NumThreads")())
    spec = RecurrentSpec(
        options.rule, options.heads, options.key_heads, *options.dims, options.dtype,
        target=vector_target(), state_dtype=options.state_dtype,
    )  # fmt: skip
    print(f"{spec}\n{num_threads} threads")
    bench, limits = Bench(spec, num_threads), Limits()
    if options.torch or options.ik_llama:
        from lib.recurrent_peers import beside

        if options.rule != "gated_delta":
            parser.error("--torch and --ik-llama are for --rule gated_delta")
        beside(bench, BATCHES, 2048, ROUNDS, options.ik_llama)
        return
    for batch in BATCHES:
        bench.decode(batch)
    peak = limits.peak(F32)
    bench.prefill(2048, peak)
    bench.prefill(REPLAYED, peak, is_replay=True)


if __name__ == "__main__":
    main()
