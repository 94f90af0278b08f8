# SPDX-License-Identifier: Apache-2.0
"""Threads on one cache and on several, in a C++ program under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..support.harness.cpp_build import build, needs_cmake


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ThreadSanitizer of Linux")
def test_no_data_races():
    options = {"TVM_PAGEDKV_BUILD_BENCH": "ON", "TVM_PAGEDKV_SANITIZE": "THREAD"}
    folder = build("thread_sanitized", "thread_test", "tvm_pagedkv", **options)
    library = folder / "libtvm_pagedkv.so"
    assert b"__tsan_write8" in library.read_bytes()
    result = subprocess.run(
        [str(folder / "thread_test"), str(library)],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and result.stdout.startswith("ok"), result.stderr[-6000:]
    print(result.stdout)


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ThreadSanitizer of Linux")
def test_no_data_races_between_workers():
    options = {"TVM_PAGEDKV_BUILD_TESTS": "ON", "TVM_PAGEDKV_SANITIZE": "THREAD"}
    folder = build("thread_sanitized_units", "runtime_tests", **options)
    result = subprocess.run(
        [str(folder / "runtime_tests"), "-sf=*worker_pool*,*task_barrier*"],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and "| 0 failed" in result.stdout, result.stderr[-6000:]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
