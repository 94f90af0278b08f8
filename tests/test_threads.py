# SPDX-License-Identifier: Apache-2.0
"""Threads of kernels, each case in a process of its own: a pool lasts as long as its thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CPUS = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")

_PRELUDE = """
import os, threading
import numpy as np, tvm
from tvm.script import tirx as T
import tvm_pagedkv as pkv

@T.prim_func
def who(handle: T.handle):
    out = T.match_buffer(handle, (64,), "int64")
    for i in T.parallel(64):
        out[i] = T.call_extern("int64", "pthread_self")

who = tvm.compile(who, target="llvm")

def used():
    out = tvm.runtime.tensor(np.zeros(64, "int64"))
    who["who"](out)
    return len(set(out.numpy().tolist()))

def cpus_of_threads():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script on some CPUs; what TVM reads of the environment is what is given."""
    script = tmp_path / "script.py"  # TVM reads the source of kernels

    def run(code: str, cpus=CPUS, **environment: str) -> None:
        script.write_text(_PRELUDE + code)
        own = ("TVM_NUM_THREADS", "TVM_BIND_THREADS")
        done = subprocess.run(
            [sys.executable, str(script)],
            env={k: v for k, v in os.environ.items() if k not in own} | environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_all_cpus_that_the_process_may_use(run):
    run(f"assert used() == pkv.num_threads() == {len(CPUS)}")


def test_no_thread_leaves_the_cpus_of_its_process(run):
    """TVM would bind the caller to CPU 0."""
    last = CPUS[-1:]
    run(f"assert used() == 1 and cpus_of_threads() == [{last}] * len(cpus_of_threads())", last)


def test_one_thread_is_not_bound(run):
    run(f"assert used() == 1 and {CPUS} in cpus_of_threads()", TVM_NUM_THREADS="1")
    run(
        f"used(); pkv.set_num_threads(1); assert used() == 1\n"
        f"assert sorted(os.sched_getaffinity(0)) == {CPUS}"
    )


@needs_two_cpus
@pytest.mark.parametrize("first", ["", "used()"], ids=["before the pool", "after"])
def test_set_num_threads(run, first):
    run(
        f"""
{first}
for count in (2, 1, 2):
    pkv.set_num_threads(count)
    assert pkv.num_threads() == used() == count

counts = []
for count in (2, 1):
    pkv.set_num_threads(count)
    thread = threading.Thread(target=lambda: counts.append(used()))
    thread.start()
    thread.join()
assert counts == [2, 1], counts
"""
    )


@needs_two_cpus
def test_a_pool_does_not_grow(run):
    run(
        """
assert pkv.num_threads() == 1
try:
    pkv.set_num_threads(2)
except RuntimeError as error:
    assert "started with 1 threads and cannot have 2" in str(error)
else:
    raise AssertionError("no error")
assert used() == 1 and os.environ["TVM_NUM_THREADS"] == "1"
""",
        TVM_NUM_THREADS="1",
    )


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**70])
def test_impossible_counts(count):
    import tvm_pagedkv as pkv

    with pytest.raises(ValueError, match=f"count must be between 1 and {len(CPUS)}.*{count}"):
        pkv.set_num_threads(count)


@pytest.mark.parametrize("count", [None, 1.0, "2", True])
def test_what_is_no_count(count):
    import tvm_pagedkv as pkv

    with pytest.raises(TypeError, match="count must be an int"):
        pkv.set_num_threads(count)
