#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time to compile the kernels of a cache: the first time, from the disk, and where it goes.

Wall time is of one build in a process of its own, after the imports; the shares are CPU seconds of
the kernels one after the other. "stock" is the pipeline of tvm.tirx.build on the same functions.
"in a model" is what a PagedKVCache adds to the compilation of a model that has it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHAPES = {  # query heads, KV heads, head dim, dtype, kinds of layers
    "default": (32, 8, 128, "float16", ["mha"]),
    "bfloat16": (32, 8, 128, "bfloat16", ["mha"]),
    "windows": (32, 8, 128, "float16", ["mha", "mha_sliding"]),
    "tiny": (4, 2, 16, "float32", ["mha"]),
}
CUDA = {"kind": "cuda", "arch": "sm_90"}


def configuration(name: str):
    """The KVCacheConfig of a name."""
    from tvm_pagedkv import KVCacheConfig, LayerSpec

    heads, kv_heads, dim, dtype, kinds = SHAPES[name]
    layers = [LayerSpec(kind, 1024 if kind == "mha_sliding" else None) for kind in kinds]
    return KVCacheConfig(len(kinds), heads, kv_heads, dim, dtype=dtype, layers=layers)


def seconds_in_process(option: str, name: str, folder: str) -> float:
    """Return what a new process with compiled files in `folder` prints."""
    command = [sys.executable, __file__, option, name]
    environment = os.environ | {"TVM_PAGEDKV_CACHE": folder}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout)


def build(name: str) -> None:
    """Print the seconds of one build."""
    import tvm_pagedkv

    config = configuration(name)
    start = time.perf_counter()
    tvm_pagedkv.build(config)
    print(time.perf_counter() - start)


def construct(name: str) -> None:
    """Print the seconds that it takes to make a PagedKVCache in a model."""
    from tvm import relax, tirx
    from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
    from tvm.target import Target

    from tvm_pagedkv import PagedKVCache
    from tvm_pagedkv.compiler.build import resolve_target

    target = resolve_target() if name == "cpu" else Target(CUDA, host="llvm")
    builder = relax.BlockBuilder()
    sizes = [tirx.Var(f"size_{i}", "int64") for i in range(5)]
    params = [relax.Var(size.name, relax.ShapeType([size])) for size in sizes]
    heads, kv_heads, dim, dtype, _ = SHAPES["default"]
    with builder.function("create", params):
        start = time.perf_counter()
        cache = PagedKVCache(
            "mha", *sizes, relax.ShapeExpr([0, 16]), 16, heads, kv_heads, dim, dim, 0, 0,
            RopeMode.NORMAL, 1, 500000, {}, relax.prim_value(0), dim, False, dtype, target,
        )  # fmt: skip
        print(time.perf_counter() - start)
        builder.emit_func_output(cache._expr)


def print_construction() -> None:
    """Print the seconds of `construct` for CPUs and, where there is nvcc, for GPUs."""
    from tvm_pagedkv.compiler.cuda.library import find_nvcc

    try:
        find_nvcc()
        kinds = ["cpu", "cuda"]
    except RuntimeError:
        kinds = ["cpu"]
    print(f"\n{'in a model':10} {'first':>8} {'from disk, median and maximum of 10':>38}")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            first, *later = (seconds_in_process("--construct", kind, folder) for _ in range(11))
        middle, maximum = statistics.median(later) * 1e3, max(later) * 1e3
        print(f"{kind:10} {first:6.2f} s {middle:7.1f} ms {maximum:7.1f} ms")


def functions_of(name: str, target, seconds: Counter) -> dict:
    """The different kernels of a configuration by their symbols."""
    import tvm_ffi

    from tir_kernels import build_kernel, kernel_names
    from tvm_pagedkv.compiler.build import kernel_spec

    config = configuration(name).resolved()
    specs = dict.fromkeys(kernel_spec(config, layer, target) for layer in config.layers)
    functions = {}
    with _Clock(seconds, "construction"):
        for spec in specs:
            for kernel in kernel_names(spec):
                function = build_kernel(kernel, spec)
                functions[tvm_ffi.structural_hash(function)] = (kernel, function)
    return {kernel: function for kernel, function in functions.values()}


class _Clock:
    """Adds the CPU seconds of a block to a counter."""

    def __init__(self, seconds: Counter, what: str):
        self.seconds, self.what = seconds, what

    def __enter__(self):
        self.start = time.process_time()

    def __exit__(self, *_):
        self.seconds[self.what] += time.process_time() - self.start


def shares(name: str, is_stock: bool) -> tuple[Counter, int, int]:
    """CPU seconds by what they are spent on, number of kernels, bytes of their object files."""
    import tvm

    from tvm_pagedkv.compiler import lowering
    from tvm_pagedkv.compiler.build import resolve_target

    target, seconds, num_bytes = resolve_target(), Counter(), 0
    functions = functions_of(name, target, seconds)
    generate = tvm.get_global_func("target.build.llvm")
    for symbol, function in functions.items():
        if is_stock:
            with _Clock(seconds, "passes"):
                module = _lower_by_stock(function.with_attr("global_symbol", symbol), target)
        else:
            with _Clock(seconds, "passes"):
                module = lowering.lower(function, symbol, target)
        with _Clock(seconds, "LLVM IR"):
            built = generate(module, target)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            with _Clock(seconds, "object"):
                built.write_to_file(str(path), "o")
            num_bytes += path.stat().st_size
    return seconds, len(functions), num_bytes


def _lower_by_stock(function, target):
    import tvm

    pipeline, of_host, _ = tvm.tirx.get_tir_pipeline("s_tir")
    bind = tvm.tirx.transform.BindTarget(target.with_host(target))
    module = bind(tvm.IRModule({function.attrs["global_symbol"]: function}))
    return of_host()(pipeline(module))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--stock", action="store_true", help="shares of the stock pipeline too")
    parser.add_argument("--build", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--construct", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build)
        return
    if arguments.construct:
        construct(arguments.construct)
        return
    print(f"{'shape':10} {'first':>8} {'from disk':>10}")
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            first, *later = (seconds_in_process("--build", name, folder) for _ in range(4))
        print(f"{name:10} {first:6.2f} s {min(later) * 1e3:7.1f} ms")
    print_construction()
    print("\nCPU seconds")
    for name in arguments.shapes:
        for is_stock in (False, True) if arguments.stock else (False,):
            seconds, count, num_bytes = shares(name, is_stock)
            parts = ", ".join(f"{what} {value:.2f}" for what, value in seconds.items())
            print(
                f"{name:10} {'stock' if is_stock else 'ours':5} {seconds.total():6.2f}: {parts}; "
                f"{count} kernels, {num_bytes / 1024:.0f} KiB"
            )


if __name__ == "__main__":
    main()
