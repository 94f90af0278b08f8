#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Cost of windows: of layers (decode_sliding, prefill_sliding), of sequences with sinks.

All runs of a line attend to the same number of (row, position) pairs, the first without a window.
The page tables of layers with a window begin as early as the runtime keeps pages; sequences with
one keep sinks, a gap in the page behind them, and the window. Times are medians of N with cold
caches (the fastest in brackets), alternating.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from lib.cases import DIM, DTYPES, HEADS, KV_HEADS, PAGE, Case, PagedInputs  # noqa: E402
from lib.rounds import Rounds, columns_of, ratio_of  # noqa: E402

from tvm_pagedkv.compiler.build import build_kernels  # noqa: E402
from tvm_pagedkv.config import POPPABLE, KVCacheConfig, LayerSpec  # noqa: E402

# (sequences, rows of the step, window)
SHAPES = ((1, 1, 1024), (8, 1, 1024), (1, 1, 4096), (1, 512, 1024), (1, 512, 300), (4, 128, 4096))


SINKS = 4


def cases_of(batch: int, rows: int, window: int) -> list[Case]:
    """Return cases without a window, with a layer's, with a sequence's: nearly equal work."""
    kind = "decode" if rows == 1 else "prefill"
    pasts = (
        window - 1 - (rows - 1) // 2,  # the mean row of a causal chunk sees `window` positions
        window - 1 + POPPABLE,
        window - 1 + PAGE - SINKS,
    )
    return [Case(kind, batch, rows, past + rows) for past in pasts]


def with_sinks(case: Case, window: int, arguments: tuple) -> tuple:
    """The arguments of `case` for sequences with a window: longer `lengths`."""
    import tvm

    at = 4 if case.kind == "decode" else 5
    rows = (PAGE, SINKS, window - 1 - SINKS)  # the slot behind the gap, what is before it and after
    info = [arguments[at].numpy(), *(np.full(case.batch, value, np.int32) for value in rows)]
    return (*arguments[:at], tvm.runtime.tensor(np.concatenate(info)), *arguments[at + 1 :])


def measure(dtype: str, budget: float) -> None:
    """Print a line for each shape."""
    layers = [LayerSpec(), LayerSpec("mha_sliding", 1)]
    config = KVCacheConfig(2, HEADS, KV_HEADS, DIM, dtype=dtype, layers=layers)
    plain_kernels, sliding_kernels = build_kernels(config).sets
    rounds = Rounds(budget)
    for batch, rows, window in SHAPES:
        cases = cases_of(batch, rows, window)
        kind = cases[0].kind
        plain, of_layer, of_sequences = (PagedInputs(case, dtype).arguments for case in cases)
        calls = (
            (plain_kernels[kind], plain),
            (sliding_kernels[f"{kind}_sliding"], (*of_layer, window)),
            (plain_kernels[kind], with_sinks(cases[2], window, of_sequences)),
        )
        times = rounds.seconds_of([functools.partial(kernel, *given) for kernel, given in calls])
        label = f"{dtype:9} {kind:7} B={batch} rows={rows:4} window={window:4}"
        ratios = " ".join(f"{ratio_of([times[0], taken]):8.2f}x" for taken in times[1:])
        print(f"{label} {columns_of(times)} {ratios} {len(times[0]):4}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per line")
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs; {HEADS}/{KV_HEADS} heads of {DIM}")
    titles = ("without window", "window of the layer", "window of sequences")
    print(f"{'':48} {' '.join(f'{x:>22}' for x in titles)} {'layer':>9} {'sequences':>9} {'N':>4}")
    for dtype in arguments.dtypes:
        measure(dtype, arguments.budget)


if __name__ == "__main__":
    main()
