# SPDX-License-Identifier: Apache-2.0
"""Each fuzz target runs for a minute; scripts/tools/fuzz.sh runs it for longer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ..support.harness.cpp_build import ROOT, build, needs_cmake

pytestmark = [needs_cmake, pytest.mark.slow]

TARGETS = sorted(path.stem for path in (ROOT / "runtime_ext" / "fuzz").glob("fuzz_*.cc"))


@pytest.fixture(scope="module")
def fuzzers() -> Path:
    return build("fuzzers", "fuzzers", TVM_PAGEDKV_BUILD_FUZZERS="ON", CMAKE_CXX_COMPILER="g++")


def fuzz(target: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(target), f"--save={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("target", TARGETS)
def test_finds_nothing(fuzzers, tmp_path, target, seed):
    result = fuzz(fuzzers / target, tmp_path, "--seconds=60", f"--seed={seed}")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"^[1-9]\d* operations, of which \d+ were refused$", result.stdout, re.MULTILINE
    )
    print(result.stdout)


def test_the_driver_finds_a_bug_and_keeps_the_input(fuzzers, tmp_path):
    result = fuzz(fuzzers / "finds_a_bug", tmp_path, "--seconds=120")
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes().startswith(b"page")
    again = fuzz(fuzzers / "finds_a_bug", tmp_path, str(kept))
    assert again.returncode != 0 and "heap-buffer-overflow" in again.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
