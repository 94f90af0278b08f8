#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels and begin_forward on the CPU, beside other implementations and the limits.

Every peer has a process of its own, with a thread bound to each CPU, and they alternate. What is
printed is the best of N, and the median; before each run 256 MiB are read, so that nothing of the
cache's pages is in the caches. GB/s count K, V, queries and outputs once; GFLOP/s the two products
over what the causal mask leaves. The class of the CPU, which decides what kernels do, comes first:
ratios hold for that class only. "of limit" is the share of what binds. Read bandwidth, "of GB/s",
which changes on some machines, is measured before and after each peer's run in each round: the
share is the median of what the rounds reach. The peak of multiplications (float32 FMA, or dot
products of bfloat16 pairs) is the best one measured between the cases, beside the best time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

import bench_begin_forward
from bench_peers import PEERS
from lib import selection
from lib import tables as printed
from lib.cases import DTYPES, Heads
from lib.measure import Measurement, start_peers

from tvm_pagedkv.compiler import choices, class_of, vector_target

RUNTIMES = ("ours", "stock")  # peers that have a begin_forward


def device_name() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, types and seconds")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument(
        "--groups", nargs="+", type=int, help="query heads of a KV head", default=[]
    )
    parser.add_argument("--dims", nargs="+", type=int, help="width of a head", default=[])
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="those whose name has TEXT")
    others = [name for name in PEERS if name != "ours"]
    usual = [name for name in others if not PEERS[name].is_quantized]
    parser.add_argument("--peers", nargs="*", default=usual, choices=others)
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PEER=PATH",
        help="the interpreter of the environment that a peer is installed in",
    )
    parser.add_argument(
        "--begin-forward", nargs="*", default=["python", "c++"], choices=["python", "c++"]
    )
    parser.add_argument("--cpus", nargs="+", type=int, help="CPUs to use (default: all)")
    parser.add_argument("--budget", type=float, help="seconds for each peer and case")
    parser.add_argument(
        "--longest", type=float, default=5.0, help="leave out what takes longer a run"
    )
    parser.add_argument("--balance", action="store_true", help="when do our threads finish?")
    parser.add_argument("--json", metavar="FILE", help="write all records")
    parser.add_argument("--plot", metavar="FILE", help="draw rooflines (.png, .svg; matplotlib)")
    options = parser.parse_args(arguments)
    options.budget = options.budget or (0.15 if options.quick else 0.25)
    for group in options.groups or []:
        if group < 1 or selection.HEADS % group:
            parser.error(f"--groups: {group} does not divide {selection.HEADS} query heads")
    options.python = dict(x.split("=", 1) for x in options.python)
    unknown = set(options.python) - set(PEERS)
    if unknown:
        parser.error(f"--python: no peer {', '.join(sorted(unknown))}")
    allowed = sorted(os.sched_getaffinity(0))
    options.cpus = options.cpus or allowed
    if not set(options.cpus) <= set(allowed):
        parser.error(f"--cpus: this process may use {allowed}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_begin_forward(options, peers: dict) -> Measurement:
    """Time begin_forward from Python and from C++."""
    runtimes = {name: peers[name] for name in RUNTIMES if name in peers}
    measurement = Measurement(runtimes, options.budget, options.longest, progress)
    if "python" in options.begin_forward:
        for case in selection.BEGIN_FORWARD:
            measurement.measure(case, "float32", Heads(1, 1, 8))
    if "c++" in options.begin_forward:
        try:
            program = bench_begin_forward.build(progress)
            for case in selection.BEGIN_FORWARD:
                own = bench_begin_forward.measure(program, case, options.cpus)
                record = {"peer": "ours, C++", "kind": case.kind, "case": case.label, **own}
                measurement.records.append(record)
        except bench_begin_forward.NotBuilt as reason:
            what = {"peer": "ours, C++", "case": "all cases", "reason": str(reason)}
            measurement.absent.append(what)
    return measurement


def main() -> None:
    options = options_of()
    start = time.perf_counter()
    names = ["ours", *options.peers]
    peers, versions, missing = start_peers(names, options.cpus, options.python)
    try:
        if "ours" in missing:
            sys.exit(f"ours: {missing['ours']}")
        limits = options.budget, options.longest
        attention = Measurement(peers, *limits, progress, options.balance)
        tables = selection.tables_of(options)
        for table in tables:
            longest = options.longest if table.is_full else min(options.longest, 1.0)
            for case in table.cases:
                attention.measure(case, table.dtype, table.heads, longest)
        begin = measure_begin_forward(options, peers)
    finally:
        for process in peers.values():
            process.close()
    machine = f"{device_name()}, CPUs {', '.join(map(str, options.cpus))} of {os.cpu_count()}"
    print(f"{machine}; pages of 16 in random order; {time.perf_counter() - start:.0f} s")
    chosen = f"{class_of().name}: {choices(vector_target())}"
    print(f"CPU class {chosen}")
    for name, version in versions.items():
        print(f"{name}: {version}" if version else name)
    for name, reason in missing.items():
        print(f"not here: {name}: {reason}")
    result = {"device": machine, "cpu_class": chosen, "versions": versions, "missing": missing}
    if attention.records:
        limits = attention.best_limits
        print(printed.limits_line(limits))
        for table in tables:
            key = (table.dtype, dataclasses.asdict(table.heads))
            own, absent = (
                [r for r in rows if (r["dtype"], r["heads"]) == key]
                for rows in (attention.records, attention.absent)
            )
            printed.print_attention(table.dtype, table.heads, own, absent, limits)
        result |= {"limits": limits, "all_limits": attention.limits}
    if begin.records or begin.absent:
        printed.print_begin_forward(begin.records, begin.absent)
    result |= {"records": attention.records + begin.records}
    result |= {"absent": attention.absent + begin.absent}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    if options.plot and attention.records:
        from lib.roofline import draw

        draw(result, options.plot)


if __name__ == "__main__":
    main()
