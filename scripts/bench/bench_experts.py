#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Experts of a layer: a share of the machine's limits, for the shape of Qwen3-30B-A3B.

Decode reads the weights of chosen experts, which differ from call to call. Its limit is the read
bandwidth, that of prefill the peak of the multiplications, the best ones of the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

HIDDEN, WIDTH, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 128, 8


def _matrix(name: str, out_features: int, in_features: int, target):
    from tvm_pagedkv_lm.formats.weight_formats import FORMATS
    from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
    from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix

    if name in FORMATS:
        return CodeMatrix(out_features, in_features, FORMATS[name], target)
    return PackedMatrix(out_features, in_features, name, target)


def _weights(matrix, rng):
    """Weights of all experts, on huge pages as a model has them; codes of any values."""
    from tvm_pagedkv._huge_pages import huge_zeros
    from tvm_pagedkv_lm.kernels.linear.expert_linear import stacked_shape

    shape = stacked_shape(matrix, NUM_EXPERTS)
    memory, tensor = huge_zeros(shape, matrix.dtype)
    if matrix.dtype == "uint8":
        memory[...] = 1
    else:
        memory[...] = rng.standard_normal(shape[1:], dtype=np.float32).astype(matrix.dtype)
    return tensor, memory.nbytes // NUM_EXPERTS


def measure(name: str, rows: list[int], budget: float, limits) -> None:
    """Print a line for each number of rows: gate, up and down of all of its experts."""
    import tvm

    from tvm_pagedkv.compiler.build import resolve_target, vector_target
    from tvm_pagedkv_lm.config.expert_config import Experts
    from tvm_pagedkv_lm.kernels.linear.expert_linear import expert_linear
    from tvm_pagedkv_lm.kernels.linear.row_codes import ROW_BYTES, encode_rows
    from tvm_pagedkv_lm.kernels.rows.gates import gated
    from tvm_pagedkv_lm.kernels.rows.routing_kernels import group_pairs

    target, rng = vector_target(), np.random.default_rng(0)
    dtype = name if name in ("float32", "float16", "bfloat16") else "bfloat16"
    up = _matrix(name, 2 * WIDTH, HIDDEN, target)
    down = _matrix(name, HIDDEN, WIDTH, target)
    args = (NUM_EXPERTS, NUM_CHOSEN, dtype)
    kernels = {
        "up": expert_linear(up, *args, dtype, gathers=True),
        "down": expert_linear(down, *args, "float32", gathers=False),
        "gated": gated("silu", WIDTH, dtype, target),
        "group": group_pairs(Experts(NUM_EXPERTS, NUM_CHOSEN, WIDTH), target),
        "encode_x": encode_rows(HIDDEN, dtype, as_words=target.has_word_dot),
        "encode_h": encode_rows(WIDTH, dtype, as_words=target.has_word_dot),
    }
    named = {key: kernel.with_attr("global_symbol", key) for key, kernel in kernels.items()}
    built = tvm.tirx.build(tvm.IRModule(named), target=resolve_target())
    call = {key: built[key] for key in kernels}
    (up_weight, up_bytes), (down_weight, down_bytes) = (_weights(m, rng) for m in (up, down))
    has_codes = up.dtype == "uint8" and up.multiplies_codes

    def encoded(kernel, x, width):
        if not has_codes:
            return [x]
        n, groups = x.shape[0], width // 32
        outs = [
            tvm.runtime.empty(shape, kind)
            for shape, kind in (
                ((n, groups, ROW_BYTES), "uint8"), ((n, groups), "float32"), ((n, groups), "int32")
            )
        ]  # fmt: skip
        call[kernel](x, *outs)
        return outs

    for n in rows:
        pairs = n * NUM_CHOSEN
        x = tvm.runtime.tensor(rng.standard_normal((n, HIDDEN), dtype=np.float32).astype(dtype))
        order = [tvm.runtime.empty(s, "int32") for s in ((pairs,), (pairs, 3), (1,))]
        both = tvm.runtime.empty((pairs, 2 * WIDTH), dtype)
        hidden = tvm.runtime.empty((pairs, WIDTH), dtype)
        out = tvm.runtime.empty((pairs, HIDDEN), "float32")
        times, shares, end = [], [], time.perf_counter() + budget
        while len(times) < 4 or time.perf_counter() < end:
            ids = np.array([rng.permutation(NUM_EXPERTS)[:NUM_CHOSEN] for _ in range(n)], "int32")
            given, count = tvm.runtime.tensor(ids), len(np.unique(ids))
            limits.read()  # also takes weights of earlier calls out of the caches
            start = time.perf_counter()
            call["group"](given, *order)
            call["up"](*encoded("encode_x", x, HIDDEN), up_weight, *order, both)
            call["gated"](both, hidden)
            call["down"](*encoded("encode_h", hidden, WIDTH), down_weight, *order, out)
            times.append(time.perf_counter() - start)
            shares.append(count * (up_bytes + down_bytes) / 1e9)
        taken, gigabytes = statistics.median(times[1:]), statistics.median(shares)
        gigaflops = 2 * pairs * 3 * HIDDEN * WIDTH / 1e9
        read, peak = limits.read_bandwidth / 1e9, limits.peak(dtype) / 1e9
        print(
            f"{name:11} {n:5} rows {taken * 1e3:9.3f} ms {gigabytes / taken:7.1f} GB/s "
            f"{gigabytes / taken / read:5.0%} of reading {gigaflops / taken:7.0f} GFLOP/s "
            f"{gigaflops / taken / peak:5.0%} of the peak",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", nargs="+", default=["float32", "bfloat16", "int8", "int4_minima"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 512])
    parser.add_argument("--budget", type=float, default=2, help="seconds per measurement")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tvm_pagedkv.measure import Limits

    limits = Limits()
    print(f"{os.environ['TVM_NUM_THREADS']} threads")
    for name in arguments.weights:
        measure(name, arguments.rows, arguments.budget, limits)


if __name__ == "__main__":
    main()
