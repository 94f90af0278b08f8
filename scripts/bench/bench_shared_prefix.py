#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Decode steps of many sequences over one prefix: read once, read by each fork, and in own copies.

A step's attention is timed through the cache, alternating, each time after the caches were emptied;
what is printed is the minimum of many. GB/s are bytes of K and V that the step has to read once,
over the time. The limit of a step is the larger one of the times that reading these and the two
products take at the read bandwidth and at the peak of the multiplications (float32 FMA, or dot
products of bfloat16 pairs), the best ones of the same run; "bound" is how many times faster than
the forks without sharing a step at that limit would be. With TVM_NUM_THREADS=1 all times are CPU
times of the thread, which other load disturbs less. Pages are those that the cache counts.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm
from lib.cases import PAGE

import tvm_pagedkv as pkv
from tvm_pagedkv.measure import Limits

DIM = 128
OWN_TOKENS = 5
SPARE_BYTES = 4 * 2**30  # what a cache of own copies must leave free


class Step:
    """A cache in a decode step of sequences that follow one prefix.

    Parameters
    ----------
    heads : (query heads, KV heads)
    batch, prefix : int
        Sequences, and positions that they have in common.
    has_copies : bool
        Whether every sequence has a prefix of its own, with the same content.
    share_prefix : bool
        Whether shared pages are read once.
    """

    def __init__(self, heads, dtype, batch, prefix, *, has_copies=False, share_prefix=True):
        own = -(-(OWN_TOKENS + 1) // PAGE) + 1
        pages = (batch if has_copies else 1) * (prefix // PAGE) + batch * own
        config = pkv.KVCacheConfig(
            num_layers=1,
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            qk_head_dim=DIM,
            dtype=dtype,
            max_num_sequences=batch,
            max_total_tokens=pages * PAGE,
            prefill_chunk_size=max(prefix, batch * OWN_TOKENS),
            share_prefix=share_prefix,
        )
        rng = np.random.default_rng(0)

        def random(*shape):
            return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

        self.cache = cache = pkv.create(config)
        tvm.get_global_func("pagedkv.shuffle_free_pages")(cache, 0)
        k, v = (random(1, prefix, heads[1], DIM) for _ in range(2))
        for i in range(batch):
            if has_copies or i == 0:
                cache.add_sequence(i)
                with cache.forward([i], [prefix]):
                    pass
                cache.debug_set_kv(i, 0, k, v)
            else:
                cache.fork_sequence(0, i, prefix)
        ids, width = list(range(batch)), heads[0] + 2 * heads[1]
        with cache.forward(ids, [OWN_TOKENS] * batch):
            cache.attention(0, random(batch * OWN_TOKENS, width, DIM))
        cache.begin_forward(ids, [1] * batch)
        self.pages_read = self.cache.stats()["step_pages_read"]
        self.qkv = tvm.runtime.tensor(random(batch, width, DIM))
        self.out = tvm.runtime.tensor(random(batch, heads[0], DIM))
        context = prefix + OWN_TOKENS + 1
        itemsize = 4 if dtype == "float32" else 2
        self.once_bytes = (prefix + batch * (OWN_TOKENS + 1)) * 2 * heads[1] * DIM * itemsize
        self.flops = 4 * heads[0] * DIM * batch * context

    def run(self) -> None:
        self.cache.attention(0, self.qkv, out=self.out)


def available_bytes() -> int:
    """Memory that the machine can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024


def measure(steps: dict, peak: Callable, limits: Limits, budget: float) -> dict:
    """Least seconds of every step, and under "read" and "peak" of the limits' loops."""
    # One thread: its own time, whatever else the machine does.
    clock = time.thread_time if os.environ["TVM_NUM_THREADS"] == "1" else time.perf_counter
    minimum = {}

    def take(name: str, run: Callable) -> None:
        start = clock()
        run()
        minimum[name] = min(clock() - start, minimum.get(name, math.inf))

    for step in steps.values():
        step.run()
    end, rounds = time.perf_counter() + budget, 0
    while rounds < 3 or time.perf_counter() < end:
        take("peak", peak)
        for name, step in steps.items():
            take("read", limits.read)
            take(name, step.run)
        rounds += 1
    return minimum


def print_plans(prefix: int, budget: float) -> None:
    """Time of begin_forward, which finds the shared pages, in CPU time of the thread."""
    print(f"begin_forward of decode steps over a prefix of {prefix}, us")
    print(f"{'sequences':>9} {'shared':>8} {'forks':>8} {'lone':>8}")
    for batch in (64, 256, 1024):
        line = f"{batch:9}"
        for share_prefix, length in ((True, prefix), (False, prefix), (True, 0)):
            config = pkv.KVCacheConfig(
                num_layers=1, num_qo_heads=1, num_kv_heads=1, qk_head_dim=8,
                max_num_sequences=batch, max_total_tokens=prefix + 2 * batch * PAGE,
                prefill_chunk_size=prefix + batch, share_prefix=share_prefix,
            )  # fmt: skip
            cache, ids = pkv.create(config), list(range(batch))
            for i in ids:
                if i == 0 or not length:
                    cache.add_sequence(i)
                else:
                    cache.fork_sequence(0, i, length)
                if i == 0 and length:
                    with cache.forward([0], [length]):
                        pass
            ones, minimum, end = [1] * batch, math.inf, time.perf_counter() + budget
            while time.perf_counter() < end:
                start = time.thread_time()
                cache.begin_forward(ids, ones)
                minimum = min(minimum, time.thread_time() - start)
                cache.end_forward()
                for i in ids:
                    cache.pop_n(i, 1)
            line += f" {minimum * 1e6:8.1f}"
        print(line, flush=True)


def report(step: Step, times: dict, read: float, peak: float) -> str:
    """A line of the table; `read` in bytes and `peak` in operations a second."""
    shared, forks = times["shared"], times["forks"]
    limit = max(step.once_bytes / read, step.flops / peak)
    line = (
        f"{shared * 1e3:8.2f} {step.once_bytes / shared / 1e9:6.1f} "
        f"{step.once_bytes / shared / read:7.0%} {step.flops / shared / 1e9:8.0f} "
        f"{step.flops / shared / peak:7.0%} {forks * 1e3:9.1f} {forks / shared:6.1f} "
        f"{forks / limit:6.1f}"
    )
    if "copies" in times:
        line += f" {times['copies'] * 1e3:10.1f} {times['copies'] / shared:6.1f}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=["32/32", "32/8", "32/4"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per row")
    parser.add_argument("--copies", action="store_true", help="measure own copies too")
    parser.add_argument("--plan", action="store_true", help="measure begin_forward instead")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if arguments.plan:
        print_plans(arguments.prefix, arguments.budget)
        return
    limits = Limits()
    print(
        f"{os.environ['TVM_NUM_THREADS']} threads, pages of {PAGE}, heads of {DIM}; "
        f"{arguments.batch} sequences over a prefix of {arguments.prefix}"
    )
    print(
        f"{'dtype':9} {'heads':>6} {'pages read':>14} {'ms':>8} {'GB/s':>6} {'of read':>7} "
        f"{'GFLOP/s':>8} {'of peak':>7} {'forks ms':>9} {'ratio':>6} {'bound':>6} "
        + f"{'copies ms':>10} {'ratio':>6}"
        * arguments.copies
    )
    read, peaks = 0.0, {}
    for dtype in arguments.dtypes:
        for text in arguments.heads:
            size = (tuple(int(x) for x in text.split("/")), dtype)
            size += (arguments.batch, arguments.prefix)
            steps = {"shared": Step(*size), "forks": Step(*size, share_prefix=False)}
            copies = arguments.batch * steps["shared"].once_bytes
            if arguments.copies and available_bytes() > copies + SPARE_BYTES:
                steps["copies"] = Step(*size, has_copies=True)
            pages = "/".join(str(steps[name].pages_read) for name in ("shared", "forks"))
            has_dot = dtype == "bfloat16" and limits.has_dot
            loop = limits.dot if has_dot else limits.fma
            times = measure(steps, loop, limits, arguments.budget)
            read = max(read, limits.read_bytes / times["read"])
            flops = limits.fma_flops * (2 if has_dot else 1)
            peaks[dtype] = max(peaks.get(dtype, 0), flops / times["peak"])
            print(
                f"{dtype:9} {text:>6} {pages:>14} "
                + report(steps["shared"], times, read, peaks[dtype]),
                flush=True,
            )
    best = ", ".join(f"{dtype} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in peaks.items())
    print(f"limits: read {read / 1e9:.1f} GB/s; {best}")


if __name__ == "__main__":
    main()
