# SPDX-License-Identifier: Apache-2.0
"""Threads of kernels, each case in a process of its own: a pool lasts as long as its thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_pagedkv import threads

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
        T.evaluate(T.call_extern("int32", "usleep", 1000))  # so that all threads come
        out[i] = T.call_extern("int64", "pthread_self")

who = tvm.compile(who, target="llvm")["who"]

def used():
    out = tvm.runtime.tensor(np.zeros(64, "int64"))
    who(out)
    return len(set(out.numpy().tolist()))

def cpus_of_threads():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script on some CPUs; of TVM's environment variables it has those that are given."""
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
    count = threads.default_num_threads(threads.cpu_quota())
    run(f"assert used() == pkv.num_threads() == {count}")


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
    """It applies to all threads of the process, and the number may grow."""
    run(
        f"""
{first}
for count in (2, 1, 2):
    pkv.set_num_threads(count)
    assert pkv.num_threads() == used() == count
    assert os.environ["TVM_NUM_THREADS"] == str(count)

counts = []
for count in (2, 1):
    pkv.set_num_threads(count)
    thread = threading.Thread(target=lambda: counts.append(used()))
    thread.start()
    thread.join()
assert counts == [2, 1], counts
""",
        TVM_NUM_THREADS="1",
    )


def test_more_threads_than_cpus(run):
    """They would only take time from each other."""
    run(f"assert pkv.num_threads() == 64 and used() <= {len(CPUS)}", TVM_NUM_THREADS="64")


def test_threads_that_come_and_go_leave_none_behind(run):
    run(
        """
def num_threads():
    return len(os.listdir("/proc/self/task"))

used()
before = num_threads()
for _ in range(5):
    thread = threading.Thread(target=used)
    thread.start()
    thread.join()
assert num_threads() == before, (num_threads(), before)
""",
        TVM_NUM_THREADS="2",
    )


def test_forks_while_threads_are_in_kernels(run):
    """The workers of the parent are not in the child, whatever they did."""
    run(
        """
import signal
stop = threading.Event()

def go_on():
    while not stop.is_set():
        used()

threads = [threading.Thread(target=go_on) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    for _ in range(5):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(7 if used() <= 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
finally:
    stop.set()
    for thread in threads:
        thread.join()
""",
        TVM_NUM_THREADS="2",
    )


@needs_two_cpus
def test_the_process_ends_at_once(run):
    """With this number, the threads of TVM's pools would keep it for hours."""
    run("assert used() == 2", TVM_NUM_THREADS="2", TVM_THREAD_POOL_SPIN_COUNT="2000000000")


def test_tvm_sets_the_number_too(run):
    run(
        """
configure = tvm.get_global_func("runtime.config_threadpool")
configure(1, 1)
assert pkv.num_threads() == used() == 1
configure(-2, 0, ["0"] * 3)
assert pkv.num_threads() == 3
""",
        TVM_NUM_THREADS="2",
    )


def test_the_error_of_the_first_task_that_fails_is_raised(run):
    run(
        """
def refuse(i):
    if i % 2 == 1:
        raise KeyError(f"item {i}")

tvm.register_global_func("test.refuse", refuse)

@T.prim_func
def fail(n: T.int32):
    for i in T.parallel(n):
        T.evaluate(T.call_packed("test.refuse", i))

fail = tvm.compile(fail, target="llvm")["fail"]
for _ in range(20):
    fail(1)
    try:
        fail(64)
        raise AssertionError("no error")
    except KeyError as error:
        assert "item 1" in str(error), error
""",
        TVM_NUM_THREADS="2",
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


# --- control groups -------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> float | None:
    """The quota by files as Linux mounts them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return threads.cpu_quota(root, root / "self")


def test_quota_of_version_2(tmp_path):
    assert write(tmp_path, {}) is None
    assert write(tmp_path, {"self": "0::/slice/app"}) is None
    assert write(tmp_path, {"slice/app/cpu.max": "max 100000"}) is None
    assert write(tmp_path, {"slice/app/cpu.max": "350000 100000"}) == 3.5
    assert write(tmp_path, {"slice/cpu.max": "100000 50000"}) == 2  # a parent's limit holds too
    assert write(tmp_path, {"slice/other/cpu.max": "100 100000"}) == 2  # another group's does not
    assert write(tmp_path, {"cpu.max": "150000 100000"}) == 1.5
    assert write(tmp_path, {"self": "0::/not/mounted/here"}) == 1.5  # in a container
    assert write(tmp_path, {"cpu.max": "100000 0"}) is None
    assert write(tmp_path, {"cpu.max": "words", "self": "nonsense\n0:\n::"}) is None


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(tmp_path, mount):
    files = {"self": "9:cpuset:/app\n5:cpu,cpuacct:/app\n0::/"}
    files["cpuset/app/cpu.cfs_quota_us"] = "1"  # not that of CPU time
    files |= {f"{mount}/cpu.cfs_quota_us": "-1", f"{mount}/cpu.cfs_period_us": "100000"}
    assert write(tmp_path, files) is None
    files = {f"{mount}/app/cpu.cfs_quota_us": "50000", f"{mount}/app/cpu.cfs_period_us": "100000"}
    assert write(tmp_path, files) == 0.5
    assert write(tmp_path, {"unified/cpu.max": "10000 100000"}) == 0.1  # both mounted


@pytest.mark.parametrize(
    "num_cpus, quota, expected",
    [(8, None, 8), (8, 3.5, 3), (8, 8.0, 8), (8, 99.0, 8), (8, 0.5, 1), (1, None, 1)],
)
def test_threads_of_a_quota(monkeypatch, num_cpus, quota, expected):
    monkeypatch.setattr(threads, "available_cpus", lambda: list(range(num_cpus)))
    assert threads.default_num_threads(quota) == expected


def test_defaults_follow_the_quota(monkeypatch):
    monkeypatch.setattr(threads, "available_cpus", lambda: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "cpu_quota", lambda: 2.5)
    monkeypatch.setattr(os, "environ", {})
    threads.set_defaults()
    assert os.environ == {"TVM_NUM_THREADS": "2", "TVM_BIND_THREADS": "0"}
    monkeypatch.setattr(os, "environ", {"TVM_NUM_THREADS": "5"})
    threads.set_defaults()
    assert os.environ["TVM_NUM_THREADS"] == "5"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
