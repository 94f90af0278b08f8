# SPDX-License-Identifier: Apache-2.0
"""Worker processes that die: the calls that need them say so, and the program goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import ParallelModel

from ..support.harness.selections import few_of

# In a process of its own, which a mistake ends.
_LOST = """
import os, signal, sys, threading, time
from tvm_pagedkv_lm import ParallelModel

split, when, end = sys.argv[1:]
sizes = {"shards": {"num_shards": 2}, "stages": {"stages": 3}}
model = ParallelModel.from_pretrained(**sizes[split])
caches = [model.create_cache(2, 10240, 10240) for _ in range(2)]
cache = caches[0]
cache.add_sequence(0)
processes = [worker["process"] for worker in model.workers()]
print(*processes[1:], flush=True)

def kill():
    os.kill(processes[1], signal.SIGKILL)

if when == "before":
    kill()
    time.sleep(0.3)
else:  # it does not answer, nor read a command that is longer than a pipe takes
    os.kill(processes[1], signal.SIGSTOP)
    threading.Timer(0.3, kill).start()
for call in (
    lambda: model.prefill(cache, [0], [[1] * 10000]),
    lambda: model.decode(cache, [0], [1]),
    lambda: cache.remove_sequence(0),
    lambda: cache.stats_of_workers(),
    lambda: cache.stats(),
    lambda: model.create_cache(2, 64, 32),
    lambda: model.workers(),
):
    if end == "at once":
        break  # with calls that nobody sees, of finalizers
    try:
        call()
    except RuntimeError as error:
        assert type(error) is RuntimeError, type(error)
        print(error)
    else:
        print("no error")
del caches, cache, call
if end == "closed":
    model.close()
    model.close()
print("done")
"""


_SILENT = """
import os, signal, sys, threading, time
from tvm_pagedkv_lm import ParallelModel

model = ParallelModel.from_pretrained(**{sys.argv[1]: 2}, timeout=5.0)
cache = model.create_cache(2, 64, 64)
cache.add_sequence(0)
model.prefill(cache, [0], [[1, 2, 3]])
time.sleep(0.2)
print(sum(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
process = model.workers()[1]["process"]
os.kill(process, signal.SIGSTOP)
for call in (lambda: model.decode(cache, [0], [1]), lambda: cache.pop_n(0, 1)):
    try:
        call()
    except RuntimeError as error:
        print(error)
model.close()
print("done")
"""

_NOT_CONNECTED = """
import sys
from tvm_pagedkv.distributed import process_session, worker

worker._CONNECT_TIMEOUT_S = 0.2
sys.executable = "/bin/false"  # a worker that ends at once
try:
    process_session(2)
except RuntimeError as error:
    print(error)
"""


def lines_of(program: str, *arguments: str) -> list[str]:
    """Run a program, and return what it has printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "split, when, end",
    [
        ("shards", "amid a call", "closed"),
        ("stages", "before", "at once"),
        *(
            pytest.param(split, when, end, marks=pytest.mark.slow)
            for split, when, end in (
                ("shards", "before", "at once"),
                ("shards", "before", "never closed"),
                ("stages", "before", "closed"),
                ("stages", "amid a call", "never closed"),
            )
        ),
    ],
)
def test_every_call_says_so(split, when, end):
    """Whether the model is closed after calls, without any, or with the interpreter."""
    first, *lines = lines_of(_LOST, split, when, end)
    processes = first.split()
    error = f"worker 1 (process {processes[0]}) has ended; load the model again"
    assert lines == [*[error] * (0 if end == "at once" else 7), "done"]
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)


@pytest.mark.parametrize("split", few_of(["num_shards", "stages"], 1))
def test_a_worker_that_never_answers(split):
    error = "the workers have not answered within 5 s, and are ended; load the model again"
    assert lines_of(_SILENT, split) == ["0", error, error, "done"]


def test_a_timeout_is_for_processes():
    with pytest.raises(ValueError, match="threads cannot be ended"):
        ParallelModel.from_pretrained(num_shards=2, threads=True, timeout=1.0)
    with pytest.raises(ValueError, match="timeout must be positive"):
        ParallelModel.from_pretrained(num_shards=2, timeout=0)


def test_a_worker_that_does_not_start():
    assert lines_of(_NOT_CONNECTED) == ["a worker has ended before it was connected"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
