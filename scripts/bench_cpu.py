#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels and begin_forward on the CPU: ours, apache-tvm's and torch's side by side.

Every time is the median of N with cold caches (the fastest in brackets). GB/s counts K and V once,
GFLOP/s the two products over what the causal mask leaves; "limit" is the share of the sequential
read bandwidth (decode) or of the float32 FMA peak (prefill), measured between the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import bench_cases as cases
from bench_cases import BEGIN_CASES, DTYPES, FLUSH_BYTES, KERNEL_CASES

PEERS = ("ours", "stock", "torch")


def measure(peer: str, dtype: str, budget: float) -> list[dict]:
    """Run a peer in its own process and return its records."""
    command = [sys.executable, str(Path(cases.__file__)), peer, dtype, str(budget)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{peer} {dtype} failed:\n{result.stderr[-3000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def device_name() -> str:
    """Name and number of the CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def rate_of(case, dtype: str, seconds: float, limits: dict) -> tuple[str, str]:
    """Rate and share of the limit, as text."""
    if case.kind == "decode":
        rate, unit, limit = case.num_bytes(dtype) / seconds, "GB/s", FLUSH_BYTES / limits["read"]
    else:
        rate, unit, limit = case.flops / seconds, "GFLOP/s", 1e9 / limits["fma"]
    return f"{rate / 1e9:6.1f} {unit:7}", f"{rate / limit:5.0%}"


def print_kernels(dtype: str, records: list[dict]) -> None:
    """One line per case and peer."""
    limits = {r["case"]: r["median_s"] for r in records if r["peer"] == "limit"}
    read, fma = FLUSH_BYTES / limits["read"] / 1e9, 1 / limits["fma"]
    print(f"\n{dtype}: read {read:.1f} GB/s, FMA peak {fma:.0f} GFLOP/s")
    header = f"{'case':20} {'peer':6} {'median':>10} {'(min)':>12} {'rate':>14} {'limit':>6}"
    print(f"{header} {'ours is':>9} {'N':>4} {'K+V MB':>7} {'GFLOP':>6}")
    for case in KERNEL_CASES:
        own = {r["peer"]: r for r in records if r["case"] == case.label}
        for peer, r in own.items():
            rate, share = rate_of(case, dtype, r["median_s"], limits)
            ratio = r["median_s"] / own["ours"]["median_s"]
            print(
                f"{case.label:20} {peer:6} {r['median_s'] * 1e3:7.3f} ms {_ms(r['min_s'])} {rate} "
                f"{share:>6} {'' if peer == 'ours' else f'{ratio:8.1f}x':>9} {r['n']:4} "
                f"{case.num_bytes(dtype) / 1e6:7.1f} {case.flops / 1e9:6.2f}"
            )


def _ms(seconds: float) -> str:
    return f"({seconds * 1e3:7.3f} ms)"


def print_begin_forward(records: list[dict]) -> None:
    """One line per batch size and peer: the host's part of a decode step."""
    print()
    for case in BEGIN_CASES:
        own = {r["peer"]: r for r in records if r["case"] == case.label}
        for peer, r in own.items():
            ratio = f"{r['median_s'] / own['ours']['median_s']:8.1f}x" if peer != "ours" else ""
            print(
                f"{case.label:20} {peer:6} {r['median_s'] * 1e6:7.1f} us "
                f"({r['min_s'] * 1e6:7.1f} us) {ratio:>31} {r['n']:4}"
            )


def plot(records: list[dict], path: str) -> None:
    """Draw how many times faster ours is than each peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in records)]
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(5 * len(dtypes), 4), sharey=True, squeeze=False
    )
    labels = [case.label for case in KERNEL_CASES]
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        median = {(r["peer"], r["case"]): r["median_s"] for r in records if r["dtype"] == dtype}
        peers = [p for p in PEERS[1:] if (p, labels[0]) in median]
        for i, peer in enumerate(peers):
            ratios = [median[peer, x] / median["ours", x] for x in labels]
            at = [x + 0.4 * i for x in range(len(labels))]
            bars = axis.bar(at, ratios, 0.38, label=f"against {peer}")
            axis.bar_label(bars, fmt="%.1f")
        axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        axis.set_yscale("log")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(dtype)
    axes[0][0].set_ylabel("times faster")
    axes[0][0].legend()
    figure.suptitle(f"{cases.HEADS}/{cases.KV_HEADS} heads of {cases.DIM}, {device_name()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--peers", nargs="*", default=list(PEERS[1:]), choices=PEERS[1:])
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per measurement")
    parser.add_argument("--json", metavar="PATH", help="write all records")
    parser.add_argument("--plot", metavar="PATH", help="draw the ratios (needs matplotlib)")
    arguments = parser.parse_args()
    shape = f"{cases.HEADS} query and {cases.KV_HEADS} KV heads of {cases.DIM}, page {cases.PAGE}"
    print(f"{device_name()}; {shape}, shuffled pages")
    records = []
    for dtype in arguments.dtypes:
        own = [
            r for peer in ("ours", *arguments.peers) for r in measure(peer, dtype, arguments.budget)
        ]
        print_kernels(dtype, own)
        records += own
    begin = [
        r
        for peer in ("ours", "stock")
        if peer == "ours" or peer in arguments.peers
        for r in measure(peer, "begin", arguments.budget)
    ]
    print_begin_forward(begin)
    records += begin
    if arguments.json:
        result = {"device": device_name(), "shape": shape, "records": records}
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    if arguments.plot:
        plot(records, arguments.plot)


if __name__ == "__main__":
    main()
