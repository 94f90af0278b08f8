# SPDX-License-Identifier: Apache-2.0
"""Threads of kernels, in processes of their own: a pool lasts as long as its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_pagedkv import threads

CPUS = sorted(os.sched_getaffinity(0))

_PRELUDE = """
import os, signal, threading, time, traceback
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

def in_child(check):
    # The child has a pool of its own. One that hangs is ended.
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            check()
            status = 7
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""

# Importing TVM takes most of the time of these tests, so those with one environment share a
# process. A line of comment begins each case.


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
    run(f"""
assert used() == pkv.num_threads() == {count}

# A single thread is not bound.
pkv.set_num_threads(1)
assert used() == 1
assert sorted(os.sched_getaffinity(0)) == {CPUS}
""")


def test_no_thread_leaves_the_cpus_of_its_process(run):
    """TVM would bind the caller to CPU 0."""
    last = CPUS[-1:]
    run(f"assert used() == 1 and cpus_of_threads() == [{last}] * len(cpus_of_threads())", last)


def test_processes_that_begin_with_one_thread(run):
    run(
        f"""
def set_counts():
    for count in {(2, 1, 2) if len(CPUS) > 1 else (1,)}:
        pkv.set_num_threads(count)
        assert pkv.num_threads() == used() == count
        assert os.environ["TVM_NUM_THREADS"] == str(count)

    # It applies to all threads of the process.
    counts = []
    for count in {(2, 1) if len(CPUS) > 1 else (1,)}:
        pkv.set_num_threads(count)
        thread = threading.Thread(target=lambda: counts.append(used()))
        thread.start()
        thread.join()
    assert counts == {[2, 1] if len(CPUS) > 1 else [1]}, counts

# Before there is a pool.
in_child(set_counts)

# More threads than CPUs would only take time from each other.
def use_many():
    os.environ["TVM_NUM_THREADS"] = "64"
    assert pkv.num_threads() == 64 and used() <= {len(CPUS)}

in_child(use_many)

# One thread is not bound.
assert used() == 1 and {CPUS} in cpus_of_threads()

# After there is a pool.
set_counts()
""",
        TVM_NUM_THREADS="1",
    )


def test_processes_with_two_threads(run):
    run(
        f"""
# Threads that come and go leave none behind.
def wait_for_threads(count):
    deadline = time.monotonic() + 60  # the system's thread ends after Python's
    while len(os.listdir("/proc/self/task")) > count:
        assert time.monotonic() < deadline
        time.sleep(0.001)

assert used() == {min(2, len(CPUS))}
count = len(os.listdir("/proc/self/task"))
for _ in range(5):
    thread = threading.Thread(target=used)
    thread.start()
    thread.join()
wait_for_threads(count)

# Forks while threads are in kernels: the workers of the parent are not in the child.
stop = threading.Event()

def go_on():
    while not stop.is_set():
        used()

def use_some():
    assert used() <= 2

threads = [threading.Thread(target=go_on) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    for _ in range(5):
        in_child(use_some)
finally:
    stop.set()
    for thread in threads:
        thread.join()

# The error of the first task that fails is raised.
def refuse(i):
    if i % 2 == 1:
        raise KeyError(f"item {{i}}")

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

# A kernel with a barrier.
@T.prim_func
def meet(x: T.handle, y: T.handle):
    a = T.match_buffer(x, (500,), "int32")
    b = T.match_buffer(y, (500,), "int32")
    with T.attr(0, "pragma_parallel_launch_point", 1):
        with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
            for i in T.parallel(500):
                a[i] = i
        for i in T.parallel(500):
            b[i] = a[499 - i]

def call_meet():
    a, b = (tvm.runtime.tensor(np.zeros(500, "int32")) for _ in range(2))
    meet(a, b)
    assert b.numpy().tolist() == list(range(499, -1, -1))

meet = tvm.compile(meet, target="llvm")["meet"]
call_meet()

# TVM's function sets the number of threads, too, and starts TVM's pool.
def configure():
    set_number = tvm.get_global_func("runtime.config_threadpool")
    set_number(1, 1)
    assert pkv.num_threads() == used() == 1
    set_number(-2, 0, ["0"] * 3)
    assert pkv.num_threads() == 3
    call_meet()

in_child(configure)

# The process ends at once. The threads of TVM's pools would keep it for hours.
""",
        TVM_NUM_THREADS="2",
        TVM_THREAD_POOL_SPIN_COUNT="2000000000",
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
