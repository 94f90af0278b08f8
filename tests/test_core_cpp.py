# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ unit tests of the std-only core."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.skipif(not (ROOT / "runtime_ext").is_dir(), reason="the C++ sources are not here")
def test_core(tmp_path):
    sanitize = "-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1"
    _run(
        "cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DTVM_PAGEDKV_BUILD_TESTS=ON",
        f"-DCMAKE_CXX_FLAGS={sanitize}",
    )  # fmt: skip
    _run("cmake", "--build", str(tmp_path), "--parallel", "2")
    print(_run("ctest", "--test-dir", str(tmp_path), "--output-on-failure"))
