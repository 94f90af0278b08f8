#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the page kernels: append with RoPE, merge, learned sinks, page copy.

Prints for each the time, bytes moved per second, the share of the machine's copy bandwidth measured
in the same run, and how many times faster it is than the kernel inside apache-tvm.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm

from tvm_pagedkv import page
from tvm_pagedkv.build import build_kernels
from tvm_pagedkv.config import KVCacheConfig

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
NUM_THREADS = len(os.sched_getaffinity(0))
FUSED = HEADS + 2 * KV_HEADS


def median_seconds(runs: list[Callable], budget: float) -> list[float]:
    """Median of each over as many rounds as fit in `budget` seconds, at least five.

    The runs of a round follow each other, so that a busy moment of the machine hits all of them.
    """
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + budget
    for run in runs:
        run()
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 2000):
        for run, own in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def copy_bandwidth(budget: float) -> float:
    """Bytes read and written per second by memcpy of 256 MiB, on one thread or on all."""
    source, sink = np.ones(2**28, np.uint8), np.ones(2**28, np.uint8)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        runs = []
        for parts in (1, NUM_THREADS):
            halves = (np.array_split(x, parts) for x in (sink, source))
            runs.append(functools.partial(_copy_all, pool, list(zip(*halves, strict=True))))
        return 2 * source.nbytes / min(median_seconds(runs, budget))


def _copy_all(pool: ThreadPoolExecutor, pairs: list) -> None:
    list(pool.map(lambda pair: np.copyto(*pair), pairs))


def cases(dtype: str, num_rows: int, ours: dict, stock: dict):
    """(name, bytes moved, run, run of the stock kernels) of each case."""
    rng = np.random.default_rng(0)
    itemsize = np.dtype(dtype).itemsize

    def tensor(*shape):
        return tvm.runtime.tensor(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def integers(values):
        return tvm.runtime.tensor(np.asarray(values, np.int32))

    num_pages = 2 * -(-num_rows // PAGE)
    page_ids = rng.permutation(num_pages)
    slots = (page_ids[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    pages = tensor(num_pages, 2, KV_HEADS, PAGE, DIM)
    qkv, q = tensor(num_rows, FUSED, DIM), tensor(num_rows, HEADS, DIM)
    k, v = tensor(num_rows, KV_HEADS, DIM), tensor(num_rows, KV_HEADS, DIM)
    positions, position_map = integers(np.arange(num_rows)), integers(slots[:num_rows])
    q_indptr = integers([0, num_rows])

    def two_kernels(kernels):
        kernels["split_rotary"](qkv, positions, q, k, v, 1)
        kernels["transpose_append"](pages, k, v, position_map)

    fused = 2 * num_rows * FUSED * DIM * itemsize
    yield (
        "rope_append",
        fused,
        lambda: ours["rope_append"](qkv, q_indptr, positions, position_map, q, pages, 1),
        lambda: two_kernels(stock),
    )
    yield "split + append", fused, lambda: two_kernels(ours), lambda: two_kernels(stock)

    append = 4 * num_rows * KV_HEADS * DIM * itemsize
    lengths = integers([num_rows])
    places = page.get_batch_indices_positions(q_indptr, lengths, num_rows)
    used = -(-num_rows // PAGE)
    table = (page_ids[:used], [0, used], [(num_rows - 1) % PAGE + 1])
    table = [integers(values) for values in table]
    for layout, shape in (("NHD", (PAGE, KV_HEADS)), ("HND", (KV_HEADS, PAGE))):
        pool = tensor(num_pages, 2, *shape, DIM)
        yield (
            f"append {layout}",
            append,
            functools.partial(page.append_paged_kv_cache, k, v, *places, pool, *table, layout),
            lambda: stock["transpose_append"](pages, k, v, position_map),
        )

    o, o_other = tensor(num_rows, HEADS, DIM), tensor(num_rows, HEADS, DIM)
    lse, lse_other = (
        tvm.runtime.tensor(rng.standard_normal((num_rows, HEADS), dtype=np.float32))
        for _ in range(2)
    )
    yield (
        "merge",
        3 * num_rows * HEADS * DIM * itemsize,
        lambda: ours["merge"](o, lse, o_other, lse_other),
        lambda: stock["merge"](o, lse, o_other, lse_other),
    )
    # So small that o stays what it is, run after run. Stock: its merge with a part of zeros.
    sinks = tvm.runtime.tensor(np.full(HEADS, -100, np.float32))
    yield (
        "apply_sinks",
        2 * num_rows * HEADS * DIM * itemsize,
        lambda: ours["apply_sinks"](o, lse, sinks),
        lambda: stock["merge"](o, lse, o_other, lse_other),
    )

    pairs = integers(np.stack([slots[:num_rows], slots[-num_rows:]]))
    yield (
        "compact_copy",
        4 * num_rows * KV_HEADS * DIM * itemsize,
        lambda: ours["compact_copy"](pages, q_indptr, pairs, 1),
        lambda: stock["compact_copy"](pages, q_indptr, pairs, 1),
    )
    ids = [int(i) for i in page_ids]
    page_pairs = list(zip(ids[: len(ids) // 2], ids[len(ids) // 2 :], strict=True))

    def copy_pages(copy_single_page):
        for source, sink in page_pairs:
            copy_single_page(pages, source, sink, PAGE)

    yield (
        f"{len(page_pairs)} pages",
        4 * len(page_pairs) * PAGE * KV_HEADS * DIM * itemsize,
        lambda: copy_pages(ours["copy_single_page"]),
        lambda: copy_pages(stock["copy_single_page"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per measurement")
    parser.add_argument("--no-stock", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(NUM_THREADS))  # read at the first launch
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.stock import stock_kernels

    bandwidth = copy_bandwidth(arguments.budget)
    print(f"{NUM_THREADS} threads, {HEADS}/{KV_HEADS} heads of {DIM}, pages of {PAGE}")
    print(f"memcpy: {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'dtype':9} {'rows':>5} {'kernel':15} {'us':>9} {'GB/s':>6} {'of copy':>8} {'stock':>7}"
    )
    for dtype in arguments.dtypes:
        config = KVCacheConfig(1, HEADS, KV_HEADS, DIM, dtype=dtype, page_size=PAGE)
        ours = dict(build_kernels(config).kernels)
        stock = {} if arguments.no_stock else stock_kernels(HEADS, KV_HEADS, DIM, dtype)
        for num_rows in arguments.rows:
            for name, num_bytes, run, run_stock in cases(dtype, num_rows, ours, stock):
                runs = [run, run_stock] if stock else [run]
                seconds, *of_stock = median_seconds(runs, arguments.budget)
                rate = num_bytes / seconds
                ratio = f"{of_stock[0] / seconds:6.1f}x" if stock else ""
                print(
                    f"{dtype:9} {num_rows:5} {name:15} {seconds * 1e6:9.1f} {rate / 1e9:6.1f} "
                    f"{rate / bandwidth:8.0%} {ratio:>7}"
                )


if __name__ == "__main__":
    main()
