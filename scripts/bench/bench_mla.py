#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention on the CPU, as a share of the machine's limits.

Latent rows of 512 + 64 columns. Every time is the median of N with cold caches (the fastest in
brackets). The limit is the larger one of the times that reading the latent rows once and the two
products take at the read bandwidth and at the peak of the multiplications (float32 FMA, or dot
products of bfloat16 pairs), measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm
from lib.cases import PAGE, seconds_of

from tvm_pagedkv.compiler.build import build_kernels
from tvm_pagedkv.config import KVCacheConfig, LayerSpec
from tvm_pagedkv.measure import Limits

CKV, KPE = 512, 64
WIDTH = CKV + KPE


@dataclass(frozen=True)
class Case:
    """Sequences; rows of the step and positions of the pages, for each of them."""

    batch: int
    rows: int
    context: int

    @property
    def label(self) -> str:
        return f"B={self.batch} rows {self.rows} ctx {self.context}"

    def num_bytes(self, dtype: str) -> int:
        """Bytes of the latent rows."""
        return self.batch * self.context * WIDTH * (4 if dtype == "float32" else 2)

    def flops(self, num_heads: int) -> int:
        """Return the operations of the two products, over what the causal mask leaves."""
        seen = self.rows * (self.context - self.rows) + self.rows * (self.rows + 1) // 2
        return 2 * num_heads * (WIDTH + CKV) * self.batch * seen


CASES = (Case(1, 1, 1024), Case(1, 1, 8192), Case(8, 1, 2048), Case(1, 64, 2048))


def arguments_of(case: Case, num_heads: int, dtype: str) -> tuple:
    """Arguments of `mla_prefill`."""
    rng = np.random.default_rng(0)
    num_pages, num_rows = -(-case.context // PAGE), case.batch * case.rows

    def floats(*shape):
        return tvm.runtime.tensor(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def integers(values):
        return tvm.runtime.tensor(np.asarray(values, np.int32))

    sequences = np.arange(case.batch + 1)
    return (
        floats(num_rows, num_heads, WIDTH),
        integers(sequences * case.rows),
        floats(case.batch * num_pages, PAGE, WIDTH),
        integers(sequences * num_pages),
        integers(rng.permutation(case.batch * num_pages)),
        integers(np.full(case.batch, case.context - (num_pages - 1) * PAGE)),
        floats(num_rows, num_heads, CKV),
        tvm.runtime.tensor(np.zeros((num_rows, num_heads), np.float32)),
        1,
        192**-0.5,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--budget", type=float, default=0.4, help="seconds per measurement")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    limits, results = Limits(), []
    for dtype in arguments.dtypes:
        for num_heads in arguments.heads:
            layer = LayerSpec("mla")
            config = KVCacheConfig(1, num_heads, 1, WIDTH, CKV, dtype=dtype, layers=[layer])
            kernel = build_kernels(config).kernels["mla_prefill"]
            for case in CASES:
                inputs = arguments_of(case, num_heads, dtype)
                run = lambda kernel=kernel, inputs=inputs: kernel(*inputs)  # noqa: E731
                times = seconds_of(run, limits.read, arguments.budget)
                results.append((dtype, num_heads, case, times))
    read, peaks = limits.read_bandwidth, {d: limits.peak(d) for d in arguments.dtypes}
    print(f"{os.environ['TVM_NUM_THREADS']} threads, pages of {PAGE}, {CKV} + {KPE} columns")
    rates = ", ".join(f"{dtype} peak {peak / 1e9:.0f} GFLOP/s" for dtype, peak in peaks.items())
    print(f"read {read / 1e9:.1f} GB/s, {rates}")
    print(
        f"{'dtype':9} {'heads':>5} {'case':24} {'ms':>9} {'(min)':>9} {'GB/s':>6} {'GFLOP/s':>8} "
        f"{'of read':>8} {'of peak':>8}  limited by"
    )
    for dtype, num_heads, case, times in results:
        seconds, fastest = statistics.median(times), min(times)
        rate, flops = case.num_bytes(dtype) / seconds, case.flops(num_heads) / seconds
        shares = {"read": rate / read, "peak": flops / peaks[dtype]}
        print(
            f"{dtype:9} {num_heads:5} {case.label:24} {seconds * 1e3:9.3f} {fastest * 1e3:9.3f} "
            f"{rate / 1e9:6.1f} {flops / 1e9:8.0f} {shares['read']:8.0%} {shares['peak']:8.0%}  "
            f"{max(shares, key=shares.get)}"
        )


if __name__ == "__main__":
    main()
