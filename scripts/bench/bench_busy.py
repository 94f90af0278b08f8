#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode beside other programs that compute, and llama.cpp on the same file.

    pip install llama-cpp-python           # here or in an environment of its own, for --python
    tvm-pagedkv download
    python scripts/bench/bench_busy.py --python ENVIRONMENT/bin/python
    python scripts/bench/bench_busy.py --loads 0 2 --threads 2 4 --without-peer

The load are processes with an endless loop in Python, started anew for each run, because it matters
on which CPUs the system places them. Engines take turns. The worst run is shown beside the median.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from bench_generate import PEERS, Engine

WARM_UP_S = 0.3  # for the system to place the loops


@contextmanager
def busy_loops(count: int):
    """Run endless loops in processes of their own."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(WARM_UP_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def start(options: argparse.Namespace, threads: int, is_peer: bool) -> Engine:
    """Start an engine with a number of threads."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    positions = str(options.prompt + options.tokens + 64)
    if is_peer:
        script = [options.python, str(PEERS / "llama_cpp_peer.py"), str(options.model), "f16"]
        return Engine(f"llama.cpp, {threads} threads", "f16", [*script, positions, "1"])
    script = [sys.executable, str(PEERS / "ours.py"), str(options.model), "float16", positions]
    return Engine(f"ours, {threads} threads", "float16", script)


def cpu_name() -> str:
    """Return the name of the processor, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def default_model() -> Path | None:
    """Return the file of the downloaded model."""
    from tvm_pagedkv_lm.model.included import smollm2_folder

    return next(iter(sorted(smollm2_folder().glob("*.gguf"))), None)


def measure(options: argparse.Namespace, engines: list[Engine]) -> dict[tuple[str, int], list]:
    """Return pairs of tokens per second, of prefill and of decode, for engines and loads."""
    prompt = np.random.default_rng(0).integers(0, 256, options.prompt).tolist()
    rates: dict[tuple[str, int], list] = {}
    for engine in engines:
        engine.ask(prompt[:64], 8)
    for number in range(options.rounds):
        for load in options.loads:
            for engine in engines:
                with busy_loops(load):
                    reply = engine.ask(prompt, options.tokens)
                steps = reply["step_s"]
                pair = options.prompt / reply["prefill_s"], len(steps) / sum(steps)
                rates.setdefault((engine.label, load), []).append(pair)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return rates


def show(rates: dict[tuple[str, int], list]) -> None:
    """Print a row for each engine and load; the share is of the engine's own idle rate."""
    print(
        "| engine | loops | decode: median | worst | of idle | prefill: median | worst | of idle |"
    )
    print("|---|---|---|---|---|---|---|---|")
    idle: dict[str, list[float]] = {}
    for (label, load), pairs in rates.items():
        prefill, decode = zip(*pairs, strict=True)
        medians = [statistics.median(decode), statistics.median(prefill)]
        if load == 0:
            idle[label] = medians
        cells = []
        bases = idle.get(label, [None, None])
        for values, median, base in zip((decode, prefill), medians, bases, strict=True):
            worst = min(values)
            share = f"{median / base:.0%}, worst {worst / base:.0%}" if base else ""
            cells += [f"{median:.0f}", f"{worst:.0f}", share]
        print(f"| {label} | {load} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of an environment with the peer")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the downloaded model)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--tokens", type=int, default=100, help="to generate (default 100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1, 2], help="endless loops")
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()])
    options = parser.parse_args()
    options.model = options.model or default_model()
    if options.model is None:
        raise SystemExit("no model: run `tvm-pagedkv download`, or name a file with --model")
    print(f"{cpu_name()}, {os.cpu_count()} CPUs; {options.model.name}")
    with ExitStack() as stack:
        engines = []
        for threads in options.threads:
            for is_peer in (False,) if options.without_peer else (False, True):
                engines.append(start(options, threads, is_peer))
                stack.callback(engines[-1].close)
        show(measure(options, engines))


if __name__ == "__main__":
    main()
