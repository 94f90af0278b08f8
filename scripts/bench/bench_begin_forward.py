# SPDX-License-Identifier: Apache-2.0
"""begin_forward as a C++ program sees it: builds runtime_ext/bench and runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench_cases import Case

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


def measure(program: Path, case: Case, cpus: list[int]) -> dict:
    """Best and median time of the case, in seconds."""
    command = [str(program), str(case.batch), str(CONTEXT)]
    if shutil.which("taskset"):
        command = ["taskset", "-c", str(cpus[0]), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"min ([\d.]+) us\s+median ([\d.]+) us.* of (\d+)", done.stdout)
    minimum, median, count = found.groups()
    return {"min_s": float(minimum) / 1e6, "median_s": float(median) / 1e6, "n": int(count)}
