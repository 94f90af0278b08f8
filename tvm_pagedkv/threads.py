# SPDX-License-Identifier: Apache-2.0
"""How many threads run a kernel on the CPU.

apache-tvm 0.27 has a pool for each thread that calls kernels. It starts with the first parallel
kernel, with as many workers as ``TVM_NUM_THREADS`` says, half of the CPUs unless it is set, and
binds them to the first CPUs of the machine, whichever ones the process may use; a single worker,
which is the caller, is bound to CPU 0. The defaults set here use the CPUs that the process may use.
"""

from __future__ import annotations

import os
import threading

import tvm_ffi

_SPECIFIED_CPUS = -2  # of runtime.config_threadpool: workers on the CPUs that it is given
_chosen = threading.local()


def available_cpus() -> list[int]:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def set_defaults() -> None:
    """Choose for TVM what the environment leaves open; before its pools start.

    Workers are bound when there is one for every CPU of the machine. When there are fewer, other
    processes may have theirs, and binding would put all of them on the same CPUs.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(len(available_cpus())))
    if os.environ["TVM_NUM_THREADS"] == "1" or os.environ["TVM_NUM_THREADS"] != str(os.cpu_count()):
        os.environ.setdefault("TVM_BIND_THREADS", "0")


def num_threads() -> int:
    """Threads that kernels called by this thread use."""
    return tvm_ffi.get_global_func("runtime.NumThreads")()


def set_num_threads(count: int) -> None:
    """Let kernels use `count` threads: those of this thread, and of threads that called none yet.

    Parameters
    ----------
    count : int
        At least 1; at most the CPUs that the process may use.

    Raises
    ------
    TypeError, ValueError
        When `count` is none of these.
    RuntimeError
        When this thread's pool has started with fewer threads, by ``TVM_NUM_THREADS`` or an earlier
        call: a pool cannot grow beyond what it started with.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count must be an int, got {count!r}")
    cpus = available_cpus()
    if not 1 <= count <= len(cpus):
        raise ValueError(f"count must be between 1 and {len(cpus)}, the CPUs; got {count}")
    _configure(count, cpus)
    most = num_threads()  # which starts the pool, hence not before
    if most != count:
        _configure(getattr(_chosen, "count", most), cpus)
        raise RuntimeError(
            f"the pool of this thread started with {most} threads and cannot have {count}; call "
            f"set_num_threads before its first kernel, or start Python with TVM_NUM_THREADS={count}"
        )
    _chosen.count = count
    os.environ["TVM_NUM_THREADS"] = str(count)


def _configure(count: int, cpus: list[int]) -> None:
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    configure(_SPECIFIED_CPUS, count, [str(cpu) for cpu in cpus])
