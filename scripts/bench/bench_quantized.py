#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Attention over quantized pages on the CPU, beside 16-bit pages and other implementations.

Every peer has a process of its own and they alternate, as in bench_cpu.py: best of N, with 256 MiB
read before each run. GB/s count the pages as they lie in memory, scales included, and queries and
outputs; "of read" is the share of the read bandwidth measured around the rounds. "to 16 bits" is
how many times faster than our kernels over pages of the case's type. The error is the largest
one of some outputs, as a share of the largest of these, against float64 over K and V as they were
before quantization. At the end come the kernels that append and quantize rows, alternating with a
copy that moves as many bytes through the same caches.

    python scripts/bench/bench_quantized.py --plot quantized.png
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench_cpu import device_name, progress
from bench_peers import PEERS
from lib.cases import Case, Heads
from lib.measure import Measurement, start_peers
from lib.shares import reads_text

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
ROWS = 512  # of a prefill
PREFILLS = (512, 2560, 8704)  # positions that its last row sees
APPENDED = (128, 2048)  # rows of appends
CODEC_PEERS = {
    "ours int8": "int8",
    "ours fp8": "float8_e4m3fn",
    "ours int5": "int5",
    "ours int4": "int4",
    "ours int8,int4": "int8,int4",
    "ours int5,int4": "int5,int4",
}
USUAL = (
    "ours int8",
    "ours fp8",
    "ours int5,int4",
    "ours int4",
    "openvino",
    "openvino u8",
    "vllm",
    "vllm fp8",
)
USUAL += ("ggml f16", "ggml q8_0")


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = [name for name in PEERS if name != "ours"]
    parser.add_argument("--dtype", default="float16", help="of queries, and of 16-bit pages")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="of decode")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="of decode")
    parser.add_argument(
        "--prefills", nargs="*", type=int, default=PREFILLS,
        help=f"contexts at the end of a prefill of {ROWS} rows",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", default=USUAL, choices=others)
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=PATH")
    parser.add_argument("--cpus", nargs="+", type=int, help="CPUs to use (default: all)")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for a peer and case")
    parser.add_argument("--json", metavar="FILE", help="write all records")
    parser.add_argument("--append-rows", nargs="*", type=int, default=APPENDED, help="of appends")
    parser.add_argument("--plot", metavar="FILE", help="draw time and bytes over the context")
    options = parser.parse_args()
    if min(options.prefills, default=ROWS) < ROWS:
        parser.error(f"--prefills: a context includes the {ROWS} rows of the prefill")
    options.python = dict(x.split("=", 1) for x in options.python)
    options.cpus = options.cpus or sorted(os.sched_getaffinity(0))
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Decode steps by batch and context, then prefills."""
    decodes = [
        Case("decode", b, 1, context) for b in options.batches for context in options.contexts
    ]
    return decodes + [Case("prefill", 1, ROWS, context) for context in options.prefills]


def print_records(records: list[dict]) -> None:
    """A line per case and peer."""
    print(
        f"{'case':20} {'peer':14} {'best ms':>9} {'MB':>7} {'GB/s':>6} {'of read':>8} "
        f"{'of GB/s':>7} {'GFLOP/s':>8} {'to 16 bits':>10} {'error':>8}"
    )
    own = {r["case"]: r["min_s"] for r in records if r["peer"] == "ours"}
    for r in records:
        rate = r["bytes"] / r["min_s"]
        shares = [r["bytes"] / each["min_s"] / max(each["reads"]) for each in r["rounds"]]
        ratio = f"{own[r['case']] / r['min_s']:9.2f}x" if r["case"] in own else ""
        print(
            f"{r['case']:20} {r['peer']:14} {r['min_s'] * 1e3:9.3f} {r['bytes'] / 1e6:7.1f} "
            f"{rate / 1e9:6.1f} {sorted(shares)[len(shares) // 2]:8.0%} {reads_text(r):>7} "
            f"{r['flops'] / r['min_s'] / 1e9:8.0f} {ratio:>10} {r['error']:8.1e}"
        )


def appends_of(options: argparse.Namespace) -> list[dict]:
    """Time appends in this process, with a thread on each of the CPUs, and print the table."""
    if not options.append_rows:
        return []
    os.sched_setaffinity(0, options.cpus)
    os.environ["TVM_NUM_THREADS"] = str(len(options.cpus))  # read at the first launch
    from lib.quantized.append import append_records, print_append_records

    codecs = [CODEC_PEERS[name] for name in options.peers if name in CODEC_PEERS]
    records = append_records([options.dtype], [None, *codecs], options.append_rows, options.budget)
    print_append_records(records)
    return records


def main() -> None:
    options = options_of()
    peers, versions, missing = start_peers(["ours", *options.peers], options.cpus, options.python)
    try:
        if "ours" in missing:
            sys.exit(f"ours: {missing['ours']}")
        measurement = Measurement(peers, options.budget, 5.0, progress)
        for case in cases_of(options):
            measurement.measure(case, options.dtype, Heads())
    finally:
        for process in peers.values():
            process.close()
    limits = measurement.best_limits
    device = f"{device_name()}, CPUs {', '.join(map(str, options.cpus))} of {os.cpu_count()}"
    print(f"{device}; {options.dtype}, {Heads().label}, pages of 16 in random order")
    print(f"limits: read up to {limits['read'] / 1e9:.1f} GB/s")
    for name, version in versions.items():
        print(f"{name}: {version}" if version else name)
    for name, reason in missing.items():
        print(f"not here: {name}: {reason}")
    print_records(measurement.records)
    for r in measurement.absent:
        print(f"not measured: {r['peer']}, {r['case']}: {r['reason']}")
    result = {"device": device, "versions": versions, "missing": missing, "limits": limits}
    result |= {"records": measurement.records, "absent": measurement.absent}
    result["appends"] = appends_of(options)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    if options.plot:
        from lib.quantized.plot import draw

        draw(result, options.plot)


if __name__ == "__main__":
    main()
