# SPDX-License-Identifier: Apache-2.0
"""The whole runtime object under AddressSanitizer and UndefinedBehaviorSanitizer.

Other tests run in a Python that loads a build with sanitizers: any access out of bounds, use after
free, overflow of a signed number and the like ends that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.harness.cpp_build import ROOT, build, needs_cmake, run

pytestmark = [needs_cmake, pytest.mark.slow]

# Leaks are not looked for: Python itself keeps memory to its end.
OPTIONS = {
    "detect_leaks": 0,
    "allocator_may_return_null": 1,  # so that too large a cache is an error, as it is elsewhere
    "detect_stack_use_after_return": 1,
}


@pytest.fixture(scope="module")
def library() -> Path:
    folder = build("sanitized", "tvm_pagedkv", TVM_PAGEDKV_SANITIZE="ON")
    return folder / "libtvm_pagedkv.so"


def sanitized(library: Path, log: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with the sanitizers' runtime and library; they write to ``<log>.<pid>``."""
    # libstdc++ as well, or the runtime would find no __cxa_throw to wrap.
    runtime = [
        run("g++", f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so.6")
    ]
    options = ":".join(f"{key}={value}" for key, value in OPTIONS.items())
    environment = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    environment |= {
        "LD_PRELOAD": " ".join(runtime),
        "TVM_PAGEDKV_LIBRARY": str(library),
        "ASAN_OPTIONS": f"{options}:log_path={log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={log}",
        "PYTHONMALLOC": "malloc",  # Python's own pools would hide what lies in them
        "TVM_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def logs(log: Path) -> str:
    return "\n".join(path.read_text() for path in log.parent.glob(f"{log.name}.*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["tests/cache/errors/test_cache_errors.py", "tests/cache/errors/test_creation_errors.py"],
        ["tests/cache/errors/test_hostile_arguments.py"],
        ["tests/cache/random/test_cache_random.py", "-k", "seed0-all"],
    ],
    ids=lambda arguments: Path(arguments[0]).stem,
)
def test_passes_with_sanitizers(library, tmp_path, arguments):
    log = tmp_path / "log"
    pytest_run = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    result = sanitized(library, log, *pytest_run)
    assert result.returncode == 0, f"{logs(log)}\n{result.stdout[-4000:]}"
    assert " passed" in result.stdout


def test_finds_a_write_out_of_bounds(library, tmp_path):
    log = tmp_path / "log"
    code = (
        "import ctypes, tvm, tvm_pagedkv\n"
        "from tvm_pagedkv import _library\n"
        f"assert str(_library.path()) == {str(library)!r}\n"
        "tensor = tvm.runtime.empty((7,), 'int8')\n"
        "ctypes.memset(tensor.data_ptr(), 0, 4096)\n"
    )
    assert b"__asan_report_store" in library.read_bytes()
    result = sanitized(library, log, "-c", code)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in logs(log), result.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
