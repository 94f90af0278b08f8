#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Cost of token trees: tree_paged against prefill for the same rows and pages.

Trees are binary, chains, or roots alone. Both kernels of a line read the same positions; where a
row of `prefill` sees the rows before it, a node sees its ancestors only. Times are medians of N
with cold caches (the fastest in brackets), alternating.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from lib.cases import DIM, DTYPES, HEADS, KV_HEADS, Case, PagedInputs  # noqa: E402
from lib.rounds import Rounds, columns_of, ratio_of  # noqa: E402

from tvm_pagedkv.compiler.build import build_kernels  # noqa: E402
from tvm_pagedkv.config import KVCacheConfig  # noqa: E402

# (sequences, nodes of each, positions before them)
SHAPES = ((1, 9, 2048), (8, 9, 1024), (1, 64, 2048), (4, 64, 512), (1, 512, 0), (1, 512, 2048))
PARENTS: dict[str, Callable[[int], int]] = {
    "binary": lambda node: (node - 1) // 2 if node else -1,
    "chain": lambda node: node - 1,
    "roots": lambda node: -1,
}


def tree_order(parents: list[int]) -> np.ndarray:
    """Depth-first number and end of the subtree of every node."""
    sizes = [1] * len(parents)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    numbers, free, top = [0] * len(parents), {}, 0
    for node, parent in enumerate(parents):
        begin = top if parent < 0 else free[parent]
        numbers[node], free[node] = begin, begin + 1
        if parent < 0:
            top += sizes[node]
        else:
            free[parent] += sizes[node]
    return np.array([[n, n + size] for n, size in zip(numbers, sizes, strict=True)], np.int32)


def measure(dtype: str, shapes: list[str], budget: float) -> None:
    """Print a line for each size and shape of trees."""
    import tvm

    config = KVCacheConfig(1, HEADS, KV_HEADS, DIM, dtype=dtype)
    kernels = build_kernels(config).kernels
    rounds = Rounds(budget)
    for batch, rows, past in SHAPES:
        plain = PagedInputs(Case("prefill", batch, rows, past + rows), dtype).arguments
        *common, _, rotary_mode, scale, theta, sm_scale = plain  # without `causal`
        scalars = (rotary_mode, scale, theta, sm_scale)
        for shape in shapes:
            order = tree_order([PARENTS[shape](node) for node in range(rows)])
            trees = [
                tvm.runtime.tensor(x)
                for x in (np.arange(batch + 1, dtype=np.int32) * rows, np.tile(order, (batch, 1)))
            ]
            runs = (
                lambda given=plain: kernels["prefill"](*given),
                lambda given=(*common, *scalars, *trees): kernels["tree_paged"](*given),
            )
            times = rounds.seconds_of(runs)
            minimum = min(times[1]) / min(times[0])
            label = f"{dtype:8} B={batch} {shape:6} {rows:3} on {past:4}"
            print(
                f"{label} {columns_of(times)} {ratio_of(times):5.2f}x ({minimum:4.2f}) "
                f"{len(times[0]):4}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--shapes", nargs="+", default=["binary"], choices=list(PARENTS))
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per line")
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs; {HEADS}/{KV_HEADS} heads of {DIM}")
    print(f"{'':33} {'prefill':>22} {'tree_paged':>22} {'ratio':>13} {'N':>4}")
    for dtype in arguments.dtypes:
        measure(dtype, arguments.shapes, arguments.budget)


if __name__ == "__main__":
    main()
