# SPDX-License-Identifier: Apache-2.0
"""begin_forward and end_forward as a C++ program sees them.

Builds runtime_ext/bench/bench_begin_forward.cc and runs it. As a program of its own it prints a
table: the same sequences in each step; one in a hundred replaced before each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lib.cases import Case

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "bench"
PROGRAM = "bench_begin_forward"
CONTEXT = 64


class NotBuilt(Exception):
    """There is no program to run."""


def build(progress: Callable[[str], None]) -> Path:
    """Build the program, or bring it up to date."""
    if shutil.which("cmake") is None:
        raise NotBuilt("no cmake; get it: pip install cmake")
    progress(f"building {PROGRAM} in {FOLDER.relative_to(ROOT)}")
    options = ["-DTVM_PAGEDKV_BUILD_BENCH=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(FOLDER), *options],
        ["cmake", "--build", str(FOLDER), "--parallel", "--target", PROGRAM],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise NotBuilt(f"{' '.join(command[:2])} failed: {lines[-1] if lines else ''}")
    return FOLDER / PROGRAM


def run(program: Path, cpu: int, *arguments: object) -> str:
    """Run the program on a CPU and return the line that it prints."""
    command = [str(program), *map(str, arguments)]
    if shutil.which("taskset"):
        command = ["taskset", "-c", str(cpu), *command]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(program: Path, case: Case, cpus: list[int]) -> dict:
    """Best and median time of the case, in seconds."""
    line = run(program, cpus[0], case.batch, CONTEXT)
    found = re.search(r"min ([\d.]+) us\s+median ([\d.]+) us.* of (\d+)", line)
    minimum, median, count = found.groups()
    return {"min_s": float(minimum) / 1e6, "median_s": float(median) / 1e6, "n": int(count)}


def main() -> None:
    """Print a line for each batch size and kind of change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024, 4096])
    parser.add_argument("--context", type=int, default=3904, help="positions of each sequence")
    parser.add_argument("--cold", action="store_true", help="read other memory before each call")
    options = parser.parse_args()
    program = build(lambda line: print(line, file=sys.stderr))
    cpu = min(os.sched_getaffinity(0))
    for change in ("same", "churn"):
        for batch in options.batches:
            words = [change, "cold"] if options.cold else [change]
            print(run(program, cpu, batch, options.context, 16, *words), end="", flush=True)


if __name__ == "__main__":
    main()
