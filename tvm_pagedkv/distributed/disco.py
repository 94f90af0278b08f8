# SPDX-License-Identifier: Apache-2.0
"""Disco sessions on CPUs: workers that run a model together, and their collective operations.

Disco has no collectives for CPUs. Here a socket connects every pair of workers, and this module
registers the functions that Disco looks up by name: `allreduce`, `allgather` and
`broadcast_from_worker0` within a worker's group, and `send_to_next_group` and
`recv_from_prev_group`, which pass activations between pipeline stages. Models call them through
``tvm.relax.op.ccl``.

Workers are threads or processes of one machine. Each has its own cache, with the layers of its
pipeline stage (`KVCacheConfig.layer_indptr`) and its share of the heads.

A session ends when nothing refers to it or to an object of its workers. apache-tvm 0.27 then joins
its threads while it holds Python's lock; and if a reference is dropped after `Session.shutdown`,
Disco notifies a worker that no longer exists, which ends the process. So workers get no objects
that only Python can free, the Python state of a worker is kept here until `forget`, and nothing
here calls `shutdown`.
"""

from __future__ import annotations

import functools
import importlib
import math
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

_CONNECT_TIMEOUT_S = 120.0
_LENGTH_BYTES = 4
# Disco's reductions, by number.
_REDUCTIONS = (np.add, np.multiply, np.minimum, np.maximum, np.add)
_AVERAGE = 4


def load_disco():
    """Return the module ``tvm.runtime.disco``, which apache-tvm 0.27 does not import by itself."""
    disco = importlib.import_module("tvm.runtime.disco")
    functions = importlib.import_module("tvm.runtime.disco._ffi_api")
    if not hasattr(functions, "SessionThreaded"):
        tvm_ffi.init_ffi_api("runtime.disco", functions.__name__)
    tvm.runtime.disco = disco
    return disco


def threaded_session(num_workers: int, num_groups: int = 1):
    """Start a Disco session whose workers are threads of this process.

    Parameters
    ----------
    num_workers : int
        A multiple of `num_groups`.
    num_groups : int
        Number of pipeline stages. The workers of a stage have consecutive ids.

    Returns
    -------
    tvm.runtime.disco.ThreadedSession

    Raises
    ------
    ValueError
        If the numbers do not fit.
    """
    _check_sizes(num_workers, num_groups)
    session = load_disco().ThreadedSession(num_workers, num_groups)
    return _connected(session, num_workers, num_groups)


def process_session(num_workers: int, num_groups: int = 1):
    """Start a Disco session whose workers, except the first, are processes.

    Parameters and errors are those of `threaded_session`.
    """
    _check_sizes(num_workers, num_groups)
    entry = "tvm_pagedkv.distributed.disco_worker"
    session = load_disco().ProcessSession(num_workers, num_groups, entry)
    return _connected(session, num_workers, num_groups)


def _check_sizes(num_workers: int, num_groups: int) -> None:
    if num_groups < 1 or num_workers < 1 or num_workers % num_groups:
        raise ValueError(
            f"num_workers must be a multiple of num_groups, both at least 1; got {num_workers} and "
            f"{num_groups}"
        )


def _connected(session, num_workers: int, num_groups: int):
    """Connect the workers of a new session, which meet in a private folder."""
    folder = tempfile.mkdtemp(prefix="pagedkv-")
    try:
        session.get_global_func("tvm_pagedkv.disco.connect")(folder, num_workers, num_groups)
        session._sync_all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return session


def forget(session) -> None:
    """Drop the Python state of the workers: their sockets and `Worker.state`.

    After this the workers cannot communicate. They end with the last reference to `session` or to
    an object of its workers.
    """
    session.get_global_func("tvm_pagedkv.disco.forget")()
    session._sync_all()
    for kept in ("_cache", "_import_python_module"):  # these refer to the session
        if hasattr(session, kept):
            delattr(session, kept)


def stage_function(session, module, name: str):
    """Return a function that runs on every worker the function of its pipeline stage.

    Parameters
    ----------
    session : tvm.runtime.disco.Session
        A session of this module with one group per stage.
    module : DRef of a Relax VM
        The result of `Session.load_vm_module`.
    name : str
        The module has a function ``{name}_{stage}`` for each stage. Its first argument is a tensor,
        and its result is a tensor of the same shape and dtype.

    Returns
    -------
    callable
        Takes the input of the first stage; each later stage receives the result of the stage before
        it. Returns a DRef to the result of each stage: on the last stage, the model's result.
    """
    return functools.partial(session.get_global_func("tvm_pagedkv.disco.run_stage"), module, name)


# --- in a worker ----------------------------------------------------------------------------------


class Worker:
    """A worker: its rank, its sockets by the rank of the other worker, and the model's state."""

    def __init__(self, rank: int, num_workers: int, num_groups: int):
        self.rank, self.group_size = rank, num_workers // num_groups
        self.group, self.num_groups = rank // self.group_size, num_groups
        self.sockets: dict[int, socket.socket] = {}
        self.state: Any = None

    @property
    def shard(self) -> int:
        """The worker's rank within its group."""
        return self.rank % self.group_size

    @property
    def members(self) -> range:
        """The ranks of the workers of this worker's group."""
        return range(self.group * self.group_size, (self.group + 1) * self.group_size)

    def connect(self, folder: Path, num_workers: int) -> None:
        """Connect to every other worker; the one with the higher rank dials."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_CONNECT_TIMEOUT_S)
            listener.bind(str(folder / f"{self.rank}.new"))
            listener.listen(num_workers)
            (folder / f"{self.rank}.new").rename(folder / str(self.rank))
            for other in range(self.rank):
                self.sockets[other] = _call(folder / str(other), self.rank)
            for _ in range(self.rank + 1, num_workers):
                peer, _ = listener.accept()
                peer.settimeout(None)
                self.sockets[int.from_bytes(_receive(peer, _LENGTH_BYTES), "little")] = peer

    def close(self) -> None:
        """Close all sockets; workers that wait for this one then fail."""
        for peer in self.sockets.values():
            peer.close()

    def send_on(self, value) -> None:
        """Send a tensor to the worker with the same shard in the next group."""
        if self.group + 1 == self.num_groups:
            raise ValueError(
                f"worker {self.rank} is in the last group and has no next one to send to"
            )
        self.send(self.rank + self.group_size, value.numpy())

    def receive_into(self, target) -> None:
        """Fill a tensor with what the same shard of the previous group sends."""
        if self.group == 0:
            raise ValueError(
                f"worker {self.rank} is in the first group and has no previous one to receive from"
            )
        received = _receive(
            self.sockets[self.rank - self.group_size],
            math.prod(target.shape) * target.dtype.itemsize,
        )
        if str(target.dtype) == "bfloat16":
            target.copyfrom(np.frombuffer(received, ml_dtypes.bfloat16).reshape(target.shape))
        else:
            _host(target).reshape(-1).view(np.uint8)[:] = received

    def send(self, to: int, array: np.ndarray) -> None:
        """Send the elements of an array to another worker."""
        self.sockets[to].sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def receive(self, sender: int, like: np.ndarray) -> np.ndarray:
        """Receive an array with the shape and dtype of `like` from another worker."""
        data = _receive(self.sockets[sender], like.nbytes)
        return np.frombuffer(data, like.dtype).reshape(like.shape)


def _call(path: Path, rank: int) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"worker {path.name} did not come within {_CONNECT_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    peer.sendall(rank.to_bytes(_LENGTH_BYTES, "little"))
    return peer


def _receive(peer: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while len(rest):
        count = peer.recv_into(rest)
        if count == 0:
            raise ConnectionError("another Disco worker has ended")
        rest = rest[count:]
    return data


# By thread id: Python drops thread-local values between the calls of a thread that it did not
# start.
_workers: dict[int, Worker] = {}


def current_worker() -> Worker:
    """Return the worker that runs in this thread.

    Raises
    ------
    RuntimeError
        If the thread is not a worker of a session of this module.
    """
    try:
        return _workers[threading.get_ident()]
    except KeyError:
        raise RuntimeError(
            "this thread is not a worker of a session made by tvm_pagedkv.distributed"
        ) from None


def _host(tensor) -> np.ndarray:
    """View a CPU tensor as a NumPy array."""
    if str(tensor.dtype) == "bfloat16":
        raise TypeError("collectives on CPUs do not support bfloat16; convert to float32")
    return np.from_dlpack(tensor)


def _connect(folder: str, num_workers: int, num_groups: int) -> None:
    rank = tvm_ffi.get_global_func("runtime.disco.worker_rank")()
    peers = Worker(rank, num_workers, num_groups)
    peers.connect(Path(folder), num_workers)
    _workers[threading.get_ident()] = peers


def _allreduce(send, reduction: int, in_group: bool, receive) -> None:
    """Reduce on the first worker, in order of rank, so that all workers get identical results."""
    peers, value = current_worker(), _host(send)
    members = peers.members if in_group else range(len(peers.sockets) + 1)
    first = members[0]
    if peers.rank != first:
        peers.send(first, value)
        _host(receive)[...] = peers.receive(first, value)
        return
    total = value.copy()
    for other in members[1:]:
        total = _REDUCTIONS[reduction](total, peers.receive(other, value))
    if reduction == _AVERAGE:
        total = (total / len(members)).astype(total.dtype)
    for other in members[1:]:
        peers.send(other, total)
    _host(receive)[...] = total


def _allgather(send, in_group: bool, receive) -> None:
    peers, value = current_worker(), _host(send)
    members = peers.members if in_group else range(len(peers.sockets) + 1)
    parts = _host(receive).reshape(len(members), *value.shape)
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
    peers, target = current_worker(), _host(receive)
    members = peers.members if in_group else range(len(peers.sockets) + 1)
    first = members[0]
    if peers.rank == first:
        target[...] = _host(send)
        for other in members[1:]:
            peers.send(other, target)
    else:
        target[...] = peers.receive(first, target)


def _forget() -> None:
    worker = _workers.pop(threading.get_ident(), None)
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
