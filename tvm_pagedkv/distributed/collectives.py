# SPDX-License-Identifier: Apache-2.0
"""The functions of workers that Disco calls by name: collectives, and those of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .worker import Worker, current_worker, enter, host_array, leave

# Disco's reductions, by number.
_REDUCTIONS = (np.add, np.multiply, np.minimum, np.maximum, np.add)
_AVERAGE = 4


def _connect(folder: str, num_workers: int, num_groups: int) -> str:
    """Make this thread a worker that is connected to the others; return what has failed."""
    rank = tvm_ffi.get_global_func("runtime.disco.worker_rank")()
    worker = Worker(rank, num_workers, num_groups)
    enter(worker)
    return _connected(worker, folder)


def _reconnect(folder: str) -> str:
    """Connect this worker to the others anew; return what has failed."""
    return _connected(current_worker(), folder)


def _connected(worker: Worker, folder: str) -> str:
    try:
        worker.connect(Path(folder))
    except OSError as error:  # it would end the process if Disco saw it
        worker.close()
        return f"worker {worker.rank}: {error}"
    return ""


def _allreduce(send, reduction: int, in_group: bool, receive) -> None:
    """Reduce on the first worker, in order of rank, so that all workers get identical results."""
    peers, value = current_worker(), host_array(send)
    members = peers.members if in_group else range(peers.num_workers)
    first = members[0]
    if peers.rank != first:
        peers.send(first, value)
        host_array(receive)[...] = peers.receive(first, value)
        return
    total = value.copy()
    for other in members[1:]:
        total = _REDUCTIONS[reduction](total, peers.receive(other, value))
    if reduction == _AVERAGE:
        total = (total / len(members)).astype(total.dtype)
    for other in members[1:]:
        peers.send(other, total)
    host_array(receive)[...] = total


def _allgather(send, in_group: bool, receive) -> None:
    peers, value = current_worker(), host_array(send)
    members = peers.members if in_group else range(peers.num_workers)
    parts = host_array(receive).reshape(len(members), *value.shape)
    # One worker sends at a time, so that no two workers block on sends to each other.
    for index, speaker in enumerate(members):
        if speaker == peers.rank:
            parts[index] = value
            for other in members:
                if other != speaker:
                    peers.send(other, value)
        else:
            parts[index] = peers.receive(speaker, value)


def _broadcast_from_worker0(send, in_group: bool, receive) -> None:
    peers, target = current_worker(), host_array(receive)
    members = peers.members if in_group else range(peers.num_workers)
    first = members[0]
    if peers.rank == first:
        target[...] = host_array(send)
        for other in members[1:]:
            peers.send(other, target)
    else:
        target[...] = peers.receive(first, target)


def _forget() -> None:
    worker = leave()
    if worker is not None:
        worker.close()


def _run_stage(module, name: str, x, *rest: Any):
    peers = current_worker()
    if peers.group > 0:
        received = tvm.runtime.empty(x.shape, x.dtype)
        peers.receive_into(received)
        x = received
    result = module[f"{name}_{peers.group}"](x, *rest)
    if peers.group + 1 < peers.num_groups:
        peers.send_on(result)
    return result


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tvm_pagedkv.disco.connect": _connect,
    "tvm_pagedkv.disco.reconnect": _reconnect,
    "tvm_pagedkv.disco.forget": _forget,
    "tvm_pagedkv.disco.run_stage": _run_stage,
    # Disco puts the name of its collectives library between the dots; on CPUs it is empty.
    "runtime.disco..allreduce": _allreduce,
    "runtime.disco..allgather": _allgather,
    "runtime.disco..broadcast_from_worker0": _broadcast_from_worker0,
    "runtime.disco..send_to_next_group": lambda value: current_worker().send_on(value),
    "runtime.disco..recv_from_prev_group": lambda target: current_worker().receive_into(target),
}
for _name, _function in _FUNCTIONS.items():
    tvm_ffi.register_global_func(_name, _function, override=True)
