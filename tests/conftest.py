# SPDX-License-Identifier: Apache-2.0
"""Set up the tests: the disk cache of compiled kernels, CPUs per worker, and selections."""

import gc
import os
import signal
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from .support.harness.expected_skips import pytest_configure  # noqa: F401  (a hook)
from .support.harness.older_release import IS_OLDER, skip_if_absent
from .support.harness.selections import (
    find_refused,
    find_spared,
    is_optimized,
    is_quick,
    may_have_quick,
    runs_long,
)

# All workers, and the runs that follow, share what is compiled.
_COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("TVM_PAGEDKV_CACHE", str(_COMPILED))
# Commands without --model run the included model, whether or not this machine has a better one.
os.environ["TVM_PAGEDKV_MODELS"] = str(_COMPILED.with_name("no_models"))

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two threads, so that kernels still split their work; idle ones sleep instead of spinning.
    # Processes that tests start inherit it. tvm and torch read it once, at their first import.
    os.environ.setdefault("TVM_NUM_THREADS", "2")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# After the variables are set, because these import tvm.
from tvm.testing.env import has_cuda  # noqa: E402

from tvm_pagedkv.compiler import vector_target  # noqa: E402

from .support.harness import fast_compilation, foreign_code, script_frames  # noqa: E402

script_frames.install()
foreign_code.install()
# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """Add the choice to compile everything as in production."""
    parser.addoption("--optimized", action="store_true", help="compile all kernels as users do")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Compile the kernels of most tests without optimisations, and those of caches when called."""
    if item.config.getoption("--optimized") or is_optimized(item.nodeid):
        return (yield)
    with fast_compilation.unoptimized(), fast_compilation.when_called():
        with fast_compilation.in_children():
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip what this CPU refuses, float16 without its conversion, and what an old TVM has not."""
    try:
        return (yield)
    except (RuntimeError, TypeError) as error:
        skip_if_absent(error)
        raise
    except ValueError as error:
        if vector_target().has_f16_convert or "has_f16_convert=False" not in str(error):
            raise
        pytest.skip("this CPU has no conversion of float16 (F16C), and kernels refuse it")


def pytest_report_header():
    """Say why tests for a GPU do not run."""
    lines = [] if has_cuda() else ["no usable GPU: tests marked gpu are deselected"]
    if IS_OLDER:
        lines.append("kernels for CUDA need apache-tvm 0.27: tests/cuda is left out")
    return lines


collect_ignore = ["cuda"] if IS_OLDER else []


def pytest_ignore_collect(collection_path, config):
    """Leave out what `-m quick` would deselect; importing it takes longer than finding it out."""
    folder = Path(__file__).resolve().parent.parent
    if config.option.markexpr == "quick" and collection_path.is_relative_to(folder):
        if not may_have_quick(collection_path.relative_to(folder).as_posix()):
            return True
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config, items):
    """Mark the quick selection, leave out what cannot run, and start with the longest."""
    for item in find_spared(items):
        item.add_marker(pytest.mark.slow)
    for item in items:
        if is_quick(item.nodeid) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.quick)
    deselected = find_refused(items, vector_target)
    if not has_cuda():
        deselected |= {item for item in items if item.get_closest_marker("gpu")}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: not runs_long(item.nodeid))  # so that workers end together


def pytest_collection_finish():
    """Leave what was imported out of garbage collections, which took half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def runner(request):
    """Run kernels for GPUs on the emulator and, where `-m gpu` selects it, on the GPU."""
    from .support.emulators.gpu import kernels_on_gpu

    with kernels_on_gpu() if request.param == "gpu" else nullcontext():
        yield


@pytest.fixture
def device(monkeypatch):
    """Put an emulated CUDA device in the place of CUDA in TVM's runtime."""
    import tvm

    from .support.emulators.cuda_emulator.device import plugged_in

    if tvm.cuda(0).exist:
        pytest.skip("this machine has the device that is emulated")
    with plugged_in(monkeypatch) as emulated:
        yield emulated


def pytest_terminal_summary(terminalreporter):
    """Report the operations of the random tests, of all workers together."""
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
