# SPDX-License-Identifier: Apache-2.0
"""How many threads run a kernel on the CPU.

apache-tvm 0.27 has a pool for each thread that calls kernels. It starts with the first parallel
kernel, with as many workers as ``TVM_NUM_THREADS`` says, half of the CPUs unless it is set, and
binds them to the first CPUs of the machine, whichever ones the process may use; a single worker,
which is the caller, is bound to CPU 0. The defaults set here use the CPUs that the process may use,
and no more of them than its control groups give it time on: what waits for a worker that is out of
time waits for the rest of a period, 100 ms.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path, PurePosixPath

import tvm_ffi

_CGROUPS, _MEMBERSHIP = "/sys/fs/cgroup", "/proc/self/cgroup"
_SPECIFIED_CPUS = -2  # of runtime.config_threadpool: workers on the CPUs that it is given
_chosen = threading.local()


def available_cpus() -> list[int]:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(root: str | Path = _CGROUPS, membership: str | Path = _MEMBERSHIP) -> float | None:
    """CPUs' worth of time that Linux's control groups allow; containers limit CPUs by them.

    Parameters
    ----------
    root : path
        Where the groups are mounted.
    membership : path
        A file that names the groups of the process.

    Returns
    -------
    float or None
        The least limit of the process's groups and of theirs; None: there is no limit.
    """
    quotas = []
    for line in _read(Path(membership)).splitlines():  # "4:cpu,cpuacct:/group", "0::/group"
        _, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        mounts = []
        if not controllers:
            mounts = [Path(root), Path(root, "unified")]
        elif "cpu" in controllers.split(","):
            mounts = [Path(root, controllers), Path(root, "cpu")]
        # A container may see the name of a group that is not mounted there, and its own as root.
        own = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            for each in (own, *own.parents):
                quotas.append(_quota(mount / each))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """The limit of a group, in the files of version 2 or 1."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def default_num_threads(quota: float | None) -> int:
    """Threads that fill the CPUs, and no more of them than the quota allows all the time."""
    num_cpus = len(available_cpus())
    return num_cpus if quota is None else max(1, min(num_cpus, int(quota)))


def set_defaults() -> None:
    """Choose for TVM what the environment leaves open; before its pools start.

    Workers are bound when there is one for every CPU of the machine. When there are fewer, other
    processes may have theirs, and binding would put all of them on the same CPUs.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(default_num_threads(cpu_quota())))
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
