# SPDX-License-Identifier: Apache-2.0
"""Builds C++ targets for tests: once for all workers, and only what has changed since."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILDS = ROOT / ".pytest_cache" / "cmake"

needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None or not (ROOT / "runtime_ext").is_dir(),
    reason="cmake or the C++ sources are missing",
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is missing: other processes wait."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str, **options) -> str:
    """The output of a command that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(name: str, *targets: str, **options: str) -> Path:
    """Build CMake targets in a folder of their own, which is kept for the next time.

    Parameters
    ----------
    name : str
        Of the folder; builds with other options need another one.
    targets : str
        What to build.
    options : str
        CMake variables.
    """
    folder = BUILDS / name
    options = {"Python_EXECUTABLE": sys.executable, **options}
    definitions = [f"-D{key}={value}" for key, value in options.items()]
    with locked(folder):
        run("cmake", "-S", str(ROOT), "-B", str(folder), *definitions)
        jobs = str(min(os.cpu_count() or 1, 4))
        run("cmake", "--build", str(folder), "--parallel", jobs, "--target", *targets)
    return folder
