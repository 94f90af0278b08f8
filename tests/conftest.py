# SPDX-License-Identifier: Apache-2.0
"""Tests keep compiled files beside pytest's own cache, and workers leave each other the CPUs."""

import os
from collections import Counter
from pathlib import Path

import pytest

from .support.expected_skips import pytest_configure  # noqa: F401  (a hook)

_COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("TVM_PAGEDKV_CACHE", str(_COMPILED))

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two threads, so that kernels still split their work; idle ones sleep instead of spinning. What
    # tests start inherits it. Before the first import of tvm and torch, which read it once.
    os.environ.setdefault("TVM_NUM_THREADS", "2")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that compile C++ or set up another environment, for a minute or more.
_LONGEST = "test_sanitizers", "test_commands", "test_thread_sanitizer", "test_core_cpp", "test_fuzz"


def pytest_collection_modifyitems(items):
    """Start with what takes longest, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.path.stem not in _LONGEST)


@pytest.fixture
def device(monkeypatch):
    """A CUDA device that is emulated, in CUDA's place in TVM's runtime."""
    import tvm

    from .support.cuda_emulator.device import plugged_in

    if tvm.cuda(0).exist:
        pytest.skip("this machine has the device that is emulated")
    with plugged_in(monkeypatch) as emulated:
        yield emulated


def pytest_terminal_summary(terminalreporter):
    """Say what the random tests have done, all workers together."""
    counts, num_tests = Counter(), 0
    for report in terminalreporter.getreports("passed"):
        done = dict(report.user_properties).get("random_steps")
        if done is not None and report.when == "call":
            counts.update(done)
            num_tests += 1
    if num_tests:
        named = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_sep("-", "random operations")
        terminalreporter.write_line(f"{sum(counts.values())} in {num_tests} tests: {named}")
