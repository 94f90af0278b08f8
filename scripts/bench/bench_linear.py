#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a decoder with 1B parameters: a share of the machine's limits, beside torch.

Each time follows a read of 256 MiB, so that weights come from memory, as they do in a step. The
limit is the larger one of the times that reading the weights and multiplying take at the read
bandwidth and at the peak of the multiplications (float32 FMA, dot products of bfloat16 pairs, or
tiles of AMX), the best ones of the same run. A line says which of these multiply the layer's rows.
torch runs in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

HIDDEN, QKV, INNER, VOCABULARY = 2048, 3072, 8192, 32768
LAYERS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "lm_head": (VOCABULARY, HIDDEN),
}


def times_of(run, flush, budget: float) -> list[float]:
    """Seconds of each call of `run`, after a flush."""
    run()
    times, end = [], time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        flush()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def measure_torch(dtype: str, rows: list[int], budget: float) -> None:
    """Print a line of JSON for each layer and number of rows: its median time."""
    import torch

    torch.set_num_threads(int(os.environ["TVM_NUM_THREADS"]))
    flush = torch.ones(2**26)
    torch_type = getattr(torch, dtype)
    with torch.inference_mode():
        for name, (out_features, in_features) in LAYERS.items():
            weight = torch.randn(out_features, in_features).to(torch_type)
            for n in rows:
                x = torch.randn(n, in_features).to(torch_type)
                run = functools.partial(torch.nn.functional.linear, x, weight)
                taken = statistics.median(times_of(run, flush.sum, budget))
                print(json.dumps([name, n, taken]), flush=True)


def torch_times(dtype: str, rows: list[int], budget: float) -> dict:
    """Return what a process that runs `measure_torch` measures."""
    command = [sys.executable, __file__, "--torch", dtype, "--budget", str(budget), "--rows"]
    done = subprocess.run([*command, *map(str, rows)], capture_output=True, text=True)
    if done.returncode:
        print(f"torch {dtype}: not measured ({done.stderr.strip().splitlines()[-1]})")
        return {}
    return {(name, n): taken for name, n, taken in map(json.loads, done.stdout.splitlines())}


def multiplied_by(matrix, n: int) -> str:
    """Return what multiplies n rows with a packed matrix."""
    from tvm_pagedkv_lm.kernels.linear.amx.tile_tasks import MIN_TILE_ROWS

    if matrix.has_tiles and n >= MIN_TILE_ROWS:
        return "AMX"
    return "pairs" if matrix.has_pairs else "float32"


def measure(dtype: str, rows: list[int], budget: float, limits) -> None:
    """Print a line for each layer and number of rows."""
    import tvm

    from tvm_pagedkv.compiler.build import resolve_target, vector_target
    from tvm_pagedkv_lm.kernels.linear.linear import linear
    from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix

    peers = torch_times(dtype, rows, budget)
    target, rng = vector_target(), np.random.default_rng(0)
    for name, (out_features, in_features) in LAYERS.items():
        matrix = PackedMatrix(out_features, in_features, dtype, target)
        function = linear(matrix, dtype, dtype).with_attr("global_symbol", "linear")
        kernel = tvm.tirx.build(tvm.IRModule({"linear": function}), target=resolve_target())
        values = rng.standard_normal(matrix.shape, dtype=np.float32).astype(dtype)
        weight = tvm.runtime.tensor(values)
        for n in rows:
            x = rng.standard_normal((n, in_features), dtype=np.float32).astype(dtype)
            out = tvm.runtime.empty((n, out_features), dtype)
            run = functools.partial(kernel["linear"], tvm.runtime.tensor(x), weight, out)
            taken = statistics.median(times_of(run, limits.read, budget))
            read, peak = limits.read_bandwidth / 1e9, limits.peak(dtype) / 1e9
            gigabytes = values.nbytes / 1e9
            gigaflops = 2 * n * out_features * in_features / 1e9
            limit = max(gigabytes / read, gigaflops / peak)
            bound = "reading" if gigabytes / read > gigaflops / peak else "peak"
            peer = peers.get((name, n))
            print(
                f"{dtype:9} {name:8} {n:5} {multiplied_by(matrix, n):7} {taken * 1e3:9.3f} ms "
                f"{gigabytes / taken:7.1f} GB/s {gigaflops / taken:7.0f} GFLOP/s "
                f"{limit / taken:6.0%} of {bound:8}"
                + (f"{peer / taken:7.2f}x torch" if peer else ""),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per measurement")
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if arguments.torch:
        measure_torch(arguments.torch, arguments.rows, arguments.budget)
        return
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tvm_pagedkv.measure import Limits

    limits = Limits()
    print(f"{os.environ['TVM_NUM_THREADS']} threads")
    for dtype in arguments.dtypes:
        measure(dtype, arguments.rows, arguments.budget, limits)


if __name__ == "__main__":
    main()
