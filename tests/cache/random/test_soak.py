# SPDX-License-Identifier: Apache-2.0
"""A short run of scripts/tools/soak.py: many steps in the same memory."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ...support.harness.cpp_build import ROOT


def soak(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "tools" / "soak.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_memory_does_not_grow():
    result = soak("--steps", "60000")
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-2]
    assert "60000 steps" in last
    for what in ("full", "forks", "pops", "removed"):
        assert int(re.search(rf"(\d+) {what}", last)[1]) > 500, last


def test_growth_is_told():
    result = soak("--steps", "2000", "--limit", "-1000")
    assert result.returncode == 1, result.stdout
    assert "MiB since step 1000" in result.stdout


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
