#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A decode step of the cache and a product of torch in one process: alone, and alternating.

Both thread pools spin for a while after their work, on the CPUs that the other one wants. A process
for each choice of the environment variables that end the spinning.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

ENVIRONMENTS = {
    "as it is": {},
    "torch does not spin": {"OMP_WAIT_POLICY": "passive"},
    "TVM does not spin": {"TVM_THREAD_POOL_SPIN_COUNT": "0"},
    "neither spins": {"OMP_WAIT_POLICY": "passive", "TVM_THREAD_POOL_SPIN_COUNT": "0"},
}
CONTEXT = 2048


def products(rows: int = 64, width: int = 2048):
    """A product of torch's."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    x, weight = torch.randn(rows, width), torch.randn(width, width)
    return lambda: x @ weight


def decode_step():
    """Attention of one row over `CONTEXT` positions, 32 and 8 heads of 128, float32."""
    import numpy as np
    import tvm

    import tvm_pagedkv as pkv

    config = pkv.KVCacheConfig(1, 32, 8, 128, dtype="float32", max_total_tokens=CONTEXT + 16)
    cache = pkv.create(config)
    cache.add_sequence(0)
    draw = np.random.default_rng(0).standard_normal
    for _ in range(0, CONTEXT, config.prefill_chunk_size):
        rows = min(CONTEXT, config.prefill_chunk_size)
        with cache.forward([0], [rows]):
            cache.attention(0, draw((rows, 48, 128), dtype="float32"))
    row = tvm.runtime.tensor(draw((1, 48, 128), dtype="float32"))

    def step():
        with cache.forward([0], [1]):
            cache.attention(0, row)
        cache.pop_n(0, 1)

    return step


def medians(runs: list, rounds: int) -> list[float]:
    """Milliseconds of each run, when they alternate."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [1e3 * statistics.median(taken[rounds // 8 :]) for taken in times]


def measure(rounds: int) -> None:
    """Print the medians of five lines of runs, in a child process."""
    product = products()
    (before,) = medians([product], rounds)  # no pool of TVM's has started yet
    step = decode_step()
    (step_alone,) = medians([step], rounds)
    together = medians([step, product], rounds)
    print(f"{before:12.3f} {together[1]:12.3f} {step_alone:12.3f} {together[0]:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.rounds)
        return
    print(f"{'medians in ms':24s} {'torch alone':>12s} {'alternating':>12s}", end=" ")
    print(f"{'ours alone':>12s} {'alternating':>12s}")
    command = [sys.executable, __file__, "--child", "--rounds", str(options.rounds)]
    for name, variables in ENVIRONMENTS.items():
        environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | variables
        child = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        print(f"{name:24s} {child.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
