#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the page kernels: append with RoPE, merge, learned sinks, page copy.

Prints for each the median time, bytes read and written per second, two shares of what plain loops
take that move as many bytes (`lib.streams`), and how many times faster it is than the kernel
inside apache-tvm. Loops and kernels find their data in the same caches, and alternate. "of copy"
is the share of a copy from one array to another; "of loop" that of a loop over as many arrays as
the kernel has (an update in place writes to lines that it has read, and is faster than a copy). No
loop converts numbers, as kernels of 16 bits have to. Loops are called as often as the kernel, and
where a call moves too little to wake another thread for, they have one thread. "append" includes
the checks of its arguments, in Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm
from lib.streams import Streams

from tir_kernels.cpu.worker import SERIAL_BELOW_BYTES
from tir_kernels.spec import FLOAT_DTYPES
from tvm_pagedkv import page
from tvm_pagedkv.compiler.build import build_kernels
from tvm_pagedkv.config import KVCacheConfig

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
NUM_THREADS = len(os.sched_getaffinity(0))
FUSED = HEADS + 2 * KV_HEADS
REPEATS = 6  # of a run in a round


def median_seconds(runs: list[Callable], budget: float) -> list[float]:
    """Median of each over as many rounds as fit in `budget` seconds, at least two.

    The runs of a round follow each other, so that a busy moment of the machine hits all of them;
    each is repeated, first unmeasured, so that it finds in the caches what it left there itself.
    """
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + budget
    while len(times[0]) < 2 * REPEATS or (time.perf_counter() < end and len(times[0]) < 2000):
        for run, own in zip(runs, times, strict=True):
            for _ in range(REPEATS):
                run()
            for _ in range(REPEATS):
                start = time.perf_counter()
                run()
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


@dataclass(frozen=True)
class Case:
    """A run of ours and of the stock kernels, which move `num_bytes` in `num_calls` calls.

    `kind` is that of the loop of `Streams` that does the like.
    """

    name: str
    kind: str
    num_bytes: int
    run: Callable
    run_stock: Callable
    num_calls: int = 1

    @property
    def on_one_thread(self) -> bool:
        return self.num_bytes // self.num_calls < SERIAL_BELOW_BYTES


def cases(dtype: str, num_rows: int, ours: dict, stock: dict):
    """Each case of a type and a number of rows."""
    rng = np.random.default_rng(0)
    itemsize = np.dtype(dtype).itemsize

    def tensor(*shape):
        return tvm.runtime.tensor(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def integers(values):
        return tvm.runtime.tensor(np.asarray(values, np.int32))

    num_pages = 2 * -(-num_rows // PAGE)
    page_ids = rng.permutation(num_pages)
    all_slots = (page_ids[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    pages = tensor(num_pages, 2, KV_HEADS, PAGE, DIM)
    qkv, q = tensor(num_rows, FUSED, DIM), tensor(num_rows, HEADS, DIM)
    k, v = tensor(num_rows, KV_HEADS, DIM), tensor(num_rows, KV_HEADS, DIM)
    positions, slots = integers(np.arange(num_rows)), integers(all_slots[:num_rows])
    query_indptr = integers([0, num_rows])

    def two_kernels(kernels):
        kernels["split_rotary"](qkv, positions, q, k, v, 1)
        kernels["transpose_append"](pages, k, v, slots)

    fused = 2 * num_rows * FUSED * DIM * itemsize
    yield Case(
        "rope_append",
        "copy",
        fused,
        lambda: ours["rope_append"](qkv, query_indptr, positions, slots, q, pages, 1),
        lambda: two_kernels(stock),
    )

    append = 4 * num_rows * KV_HEADS * DIM * itemsize
    lengths = integers([num_rows])
    places = page.get_batch_indices_positions(query_indptr, lengths, num_rows)
    used = -(-num_rows // PAGE)
    table = (page_ids[:used], [0, used], [(num_rows - 1) % PAGE + 1])
    table = [integers(values) for values in table]
    for layout, shape in (("NHD", (PAGE, KV_HEADS)), ("HND", (KV_HEADS, PAGE))):
        pool = tensor(num_pages, 2, *shape, DIM)
        yield Case(
            f"append {layout}",
            "copy",
            append,
            functools.partial(page.append_paged_kv_cache, k, v, *places, pool, *table, layout),
            lambda: stock["transpose_append"](pages, k, v, slots),
        )

    o, o_other = tensor(num_rows, HEADS, DIM), tensor(num_rows, HEADS, DIM)
    lse, lse_other = (
        tvm.runtime.tensor(rng.standard_normal((num_rows, HEADS), dtype=np.float32))
        for _ in range(2)
    )
    yield Case(
        "merge",
        "add",
        3 * num_rows * HEADS * DIM * itemsize,
        lambda: ours["merge"](o, lse, o_other, lse_other),
        lambda: stock["merge"](o, lse, o_other, lse_other),
    )
    # So small that o stays what it is, run after run. Stock: its merge with a part of zeros.
    sinks = tvm.runtime.tensor(np.full(HEADS, -100, np.float32))
    yield Case(
        "apply_sinks",
        "scale",
        2 * num_rows * HEADS * DIM * itemsize,
        lambda: ours["apply_sinks"](o, lse, sinks),
        lambda: stock["merge"](o, lse, o_other, lse_other),
    )

    pairs = integers(np.stack([all_slots[:num_rows], all_slots[-num_rows:]]))
    yield Case(
        "compact_copy",
        "copy",
        4 * num_rows * KV_HEADS * DIM * itemsize,
        lambda: ours["compact_copy"](pages, query_indptr, pairs, 1),
        lambda: stock["compact_copy"](pages, query_indptr, pairs, 1),
    )
    ids = [int(i) for i in page_ids]
    page_pairs = list(zip(ids[: len(ids) // 2], ids[len(ids) // 2 :], strict=True))

    def copy_each(copy_single_page):
        for source, sink in page_pairs:
            copy_single_page(pages, source, sink, PAGE)

    num_bytes = 4 * len(page_pairs) * PAGE * KV_HEADS * DIM * itemsize
    yield Case(
        f"{len(page_pairs)} pages",
        "copy",
        num_bytes,
        lambda: copy_each(ours["copy_single_page"]),
        lambda: copy_each(stock["copy_single_page"]),
        len(page_pairs),
    )
    copies = integers([*zip(*page_pairs, strict=True), [PAGE] * len(page_pairs)])
    yield Case(
        "copy_pages",
        "copy",
        num_bytes,
        lambda: ours["copy_pages"](pages, copies),
        lambda: copy_each(stock["copy_single_page"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512, 2048])
    parser.add_argument("--dtypes", nargs="+", default=list(FLOAT_DTYPES))
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per measurement")
    parser.add_argument("--no-stock", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(NUM_THREADS))  # read at the first launch
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.emulators.stock import stock_kernels

    streams = Streams()
    print(f"{NUM_THREADS} threads, {HEADS}/{KV_HEADS} heads of {DIM}, pages of {PAGE}")
    print(
        f"{'dtype':9} {'rows':>5} {'kernel':13} {'us':>9} {'GB/s':>6} {'copy':>6} {'of copy':>8} "
        f"{'of loop':>8} {'stock':>7}"
    )
    for dtype in arguments.dtypes:
        config = KVCacheConfig(1, HEADS, KV_HEADS, DIM, dtype=dtype, page_size=PAGE)
        ours = dict(build_kernels(config).kernels)
        stock = {} if arguments.no_stock else stock_kernels(HEADS, KV_HEADS, DIM, dtype)
        for num_rows in arguments.rows:
            for case in cases(dtype, num_rows, ours, stock):
                loops = [
                    streams.runs(kind, case.num_bytes, case.on_one_thread, case.num_calls)
                    for kind in dict.fromkeys(("copy", case.kind))
                ]
                runs = [case.run, *sum(loops, []), *([case.run_stock] if stock else [])]
                seconds, *others = median_seconds(runs, arguments.budget)
                copy = min(others[: len(loops[0])])
                loop = min(others[len(loops[0]) : len(sum(loops, []))], default=copy)
                ratio = f"{others[-1] / seconds:6.1f}x" if stock else ""
                rate = case.num_bytes / 1e9
                print(
                    f"{dtype:9} {num_rows:5} {case.name:13} {seconds * 1e6:9.1f} "
                    f"{rate / seconds:6.1f} {rate / copy:6.1f} {copy / seconds:8.0%} "
                    f"{loop / seconds:8.0%} {ratio:>7}"
                )


if __name__ == "__main__":
    main()
