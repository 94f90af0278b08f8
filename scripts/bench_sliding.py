#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What a window costs: decode_sliding and prefill_sliding against decode and prefill.

Both kernels of a line attend to the same number of (row, position) pairs. The page tables of those
with a window begin as early as the runtime keeps pages. Times are medians of N with cold caches
(the fastest in brackets), taken in turns.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from bench_cases import DIM, DTYPES, HEADS, KV_HEADS, Case, PagedInputs  # noqa: E402
from bench_turns import Turns, columns_of, ratio_of  # noqa: E402

from tvm_pagedkv.build import build_kernels  # noqa: E402
from tvm_pagedkv.config import POPPABLE, KVCacheConfig, LayerSpec  # noqa: E402

# (sequences, rows of the step, window)
SHAPES = ((1, 1, 1024), (8, 1, 1024), (1, 1, 4096), (1, 512, 1024), (1, 512, 300), (4, 128, 4096))


def plain_and_sliding(batch: int, rows: int, window: int) -> tuple[Case, Case]:
    """Two cases with the same number of visible pairs, to within a row."""
    kind = "decode" if rows == 1 else "prefill"
    past = window - 1 - (rows - 1) // 2  # the mean row of a causal chunk sees `window` positions
    kept = window - 1 + POPPABLE
    return Case(kind, batch, rows, past + rows), Case(kind, batch, rows, kept + rows)


def measure(dtype: str, budget: float) -> None:
    """Print a line for each shape."""
    layers = [LayerSpec(), LayerSpec("mha_sliding", 1)]
    config = KVCacheConfig(2, HEADS, KV_HEADS, DIM, dtype=dtype, layers=layers)
    plain_kernels, sliding_kernels = build_kernels(config).sets
    turns = Turns(budget)
    for batch, rows, window in SHAPES:
        cases = plain_and_sliding(batch, rows, window)
        plain, sliding = (PagedInputs(case, dtype).arguments for case in cases)
        kind = cases[0].kind
        runs = (
            lambda kernel=plain_kernels[kind], given=plain: kernel(*given),
            lambda kernel=sliding_kernels[f"{kind}_sliding"], given=(*sliding, window): kernel(
                *given
            ),
        )
        times = turns.seconds_of(runs)
        label = f"{dtype:9} {kind:7} B={batch} rows={rows:4} window={window:4}"
        print(f"{label} {columns_of(times)} {ratio_of(times):6.2f}x {len(times[0]):4}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per line")
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs; {HEADS}/{KV_HEADS} heads of {DIM}")
    print(f"{'':48} {'without window':>22} {'with window':>22} {'ratio':>7} {'N':>4}")
    for dtype in arguments.dtypes:
        measure(dtype, arguments.budget)


if __name__ == "__main__":
    main()
