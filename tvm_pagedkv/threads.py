# SPDX-License-Identifier: Apache-2.0
"""The number of threads that run a kernel on the CPU.

All calling threads share one pool of the process (``runtime_ext/base/worker_pool.h``). Its threads
are not bound to CPUs: a bound thread would have to wait where another program runs on its CPU, and
several processes would be bound to the same ones.

The default set here is the number of CPUs that the process may use, up to the CPU quota of its
control groups. A thread that exceeds the quota sleeps for the rest of the period, 100 ms.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import tvm_ffi

_CGROUPS, _MEMBERSHIP = "/sys/fs/cgroup", "/proc/self/cgroup"


def available_cpus() -> list[int]:
    """Return the CPUs that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(root: str | Path = _CGROUPS, membership: str | Path = _MEMBERSHIP) -> float | None:
    """Return the CPU quota of Linux control groups, which containers use to limit CPUs.

    Parameters
    ----------
    root : path
        The mount point of the groups.
    membership : path
        A file that lists the groups of the process.

    Returns
    -------
    float or None
        The smallest quota, in CPUs, of the process's groups and their ancestors; None if there is
        no limit.
    """
    quotas = []
    for line in _read(Path(membership)).splitlines():  # "4:cpu,cpuacct:/group", "0::/group"
        _, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        mounts = []
        if not controllers:
            mounts = [Path(root), Path(root, "unified")]
        elif "cpu" in controllers.split(","):
            mounts = [Path(root, controllers), Path(root, "cpu")]
        # In a container the listed group may not be mounted; its own group is then the root.
        own = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            for each in (own, *own.parents):
                quotas.append(_quota(mount / each))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Return the quota of one group, from the files of cgroup version 2 or 1."""
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
    """Return the number of CPUs that the process may use, limited by the quota."""
    num_cpus = len(available_cpus())
    return num_cpus if quota is None else max(1, min(num_cpus, int(quota)))


def set_defaults() -> None:
    """Set TVM's environment variables that are not set; call it before TVM is loaded.

    Kernels of libraries that were loaded before this package run in TVM's own pools. These bind
    their threads to the first CPUs of the machine, even to CPUs that the process may not use, so
    they do it only if there is a thread for every CPU of the machine.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(default_num_threads(cpu_quota())))
    if os.environ["TVM_NUM_THREADS"] == "1" or os.environ["TVM_NUM_THREADS"] != str(os.cpu_count()):
        os.environ.setdefault("TVM_BIND_THREADS", "0")


def num_threads() -> int:
    """Return the number of threads that share the work of a kernel."""
    return tvm_ffi.get_global_func("runtime.NumThreads")()


def set_num_threads(count: int) -> None:
    """Set the number of threads that share the work of a kernel.

    It applies to the whole process, from the next kernel on. On a busy machine kernels use fewer.

    Parameters
    ----------
    count : int
        From 1 to the number of CPUs that the process may use.

    Raises
    ------
    TypeError, ValueError
        If `count` is not an integer in this range.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count must be an int, got {count!r}")
    cpus = available_cpus()
    if not 1 <= count <= len(cpus):
        raise ValueError(f"count must be between 1 and {len(cpus)}, the CPUs; got {count}")
    tvm_ffi.get_global_func("pagedkv.set_num_threads")(count)
    os.environ["TVM_NUM_THREADS"] = str(count)  # for processes that this one starts
