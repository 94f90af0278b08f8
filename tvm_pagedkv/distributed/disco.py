# SPDX-License-Identifier: Apache-2.0
"""Disco sessions on CPUs: several workers that run a model together, and how they talk.

Disco has no collective operations for CPUs. Here every worker is joined with every other one by a
socket, and the names under which Disco looks for such operations are served: `allreduce`,
`allgather` and `broadcast_from_worker0` within the worker's group, and `send_to_next_group` and
`recv_from_prev_group`, which pass activations on between pipeline stages. Models call them as
``tvm.relax.op.ccl`` does.

Workers are threads or processes of one machine. Each makes its own cache, of its pipeline stage
(`KVCacheConfig.layer_indptr`) and of its share of the heads.

A session ends when nothing refers to it or to what its workers hold. apache-tvm 0.27 then waits for
its threads while Python stands still, and a reference that goes after `Session.shutdown` ends the
process, for it is told to a worker that has gone. So workers are given no object that only Python
could free, what Python has for a worker is kept here and goes with `forget`, and nothing here calls
`shutdown`.
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
# What Disco's numbers for reductions mean.
_REDUCTIONS = (np.add, np.multiply, np.minimum, np.maximum, np.add)
_AVERAGE = 4


def load_disco():
    """The module ``tvm.runtime.disco``, which apache-tvm 0.27 leaves out when it is imported."""
    disco = importlib.import_module("tvm.runtime.disco")
    functions = importlib.import_module("tvm.runtime.disco._ffi_api")
    if not hasattr(functions, "SessionThreaded"):
        tvm_ffi.init_ffi_api("runtime.disco", functions.__name__)
    tvm.runtime.disco = disco
    return disco


def threaded_session(num_workers: int, num_groups: int = 1):
    """A Disco session whose workers are threads of this process.

    Parameters
    ----------
    num_workers : int
        A multiple of `num_groups`.
    num_groups : int
        Pipeline stages; workers of one group are those of one stage, with consecutive ids.

    Returns
    -------
    tvm.runtime.disco.ThreadedSession
    """
    _check_sizes(num_workers, num_groups)
    session = load_disco().ThreadedSession(num_workers, num_groups)
    return _connected(session, num_workers, num_groups)


def process_session(num_workers: int, num_groups: int = 1):
    """As `threaded_session`, but each worker except the first is a process of its own."""
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
    """Let the workers of a new session find each other in a folder that nobody else knows."""
    folder = tempfile.mkdtemp(prefix="pagedkv-")
    try:
        session.get_global_func("tvm_pagedkv.disco.connect")(folder, num_workers, num_groups)
        session._sync_all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return session


def forget(session) -> None:
    """Let the workers drop what they keep in Python: their sockets, and `Worker.state`.

    They end when the last reference to `session` or to what its workers hold goes, whenever that
    is. In the meantime they cannot work together any more.
    """
    session.get_global_func("tvm_pagedkv.disco.forget")()
    session._sync_all()
    for kept in ("_cache", "_import_python_module"):  # functions that refer to the session
        if hasattr(session, kept):
            delattr(session, kept)


def stage_function(session, module, name: str):
    """One function for all workers that does on each what its pipeline stage has to do.

    Parameters
    ----------
    session : of this module, with a group for each stage
    module : DRef of a Relax VM, as `Session.load_vm_module` returns it
    name : str
        The module has a function ``{name}_{stage}`` for each stage, whose first argument is a
        tensor and whose result is one of the same shape and type.

    Returns
    -------
    Callable
        Takes the input of the first stage; the other stages take their input from the one before
        them. The result is what each stage gives; on the workers of the last one, of the model.
    """
    return functools.partial(session.get_global_func("tvm_pagedkv.disco.run_stage"), module, name)


# --- in a worker ----------------------------------------------------------------------------------


class Worker:
    """One worker: who it is, its sockets by the ids of the others, and what a model keeps in it."""

    def __init__(self, rank: int, num_workers: int, num_groups: int):
        self.rank, self.group_size = rank, num_workers // num_groups
        self.group, self.num_groups = rank // self.group_size, num_groups
        self.sockets: dict[int, socket.socket] = {}
        self.state: Any = None

    @property
    def shard(self) -> int:
        """Its number within its group."""
        return self.rank % self.group_size

    @property
    def members(self) -> range:
        """Workers of this one's group."""
        return range(self.group * self.group_size, (self.group + 1) * self.group_size)

    def connect(self, folder: Path, num_workers: int) -> None:
        """Meet every other worker: those with higher ids call those with lower ones."""
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
        """Leave the others, whose waiting for this worker then fails."""
        for peer in self.sockets.values():
            peer.close()

    def send_on(self, value) -> None:
        """Send a tensor to the worker with the same number in the next group."""
        if self.group + 1 == self.num_groups:
            raise ValueError(f"worker {self.rank} is of the last group: there is none to send to")
        self.send(self.rank + self.group_size, value.numpy())

    def receive_into(self, target) -> None:
        """Fill a tensor with what the worker of the group before this one sends on."""
        if self.group == 0:
            raise ValueError(f"worker {self.rank} is of the first group: nobody sends to it")
        received = _receive(
            self.sockets[self.rank - self.group_size],
            math.prod(target.shape) * target.dtype.itemsize,
        )
        if str(target.dtype) == "bfloat16":
            target.copyfrom(np.frombuffer(received, ml_dtypes.bfloat16).reshape(target.shape))
        else:
            _host(target).reshape(-1).view(np.uint8)[:] = received

    def send(self, to: int, array: np.ndarray) -> None:
        """Send the numbers of an array to another worker."""
        self.sockets[to].sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def receive(self, sender: int, like: np.ndarray) -> np.ndarray:
        """An array of the shape and type of `like` from another worker."""
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
            raise ConnectionError("another Disco worker has gone")
        rest = rest[count:]
    return data


# A worker is a thread, but Python forgets thread-local values between the calls of one that it
# did not start: so by the thread's id.
_workers: dict[int, Worker] = {}


def current_worker() -> Worker:
    """The worker that this thread is.

    Raises
    ------
    RuntimeError
        When it is none of a session made by this module.
    """
    try:
        return _workers[threading.get_ident()]
    except KeyError:
        raise RuntimeError(
            "this thread is no worker of a session made by tvm_pagedkv.disco"
        ) from None


def _host(tensor) -> np.ndarray:
    """A NumPy array on the memory of a CPU tensor."""
    if str(tensor.dtype) == "bfloat16":
        raise TypeError("collectives on CPUs take no bfloat16; convert to float32")
    return np.from_dlpack(tensor)


def _connect(folder: str, num_workers: int, num_groups: int) -> None:
    rank = tvm_ffi.get_global_func("runtime.disco.worker_rank")()
    peers = Worker(rank, num_workers, num_groups)
    peers.connect(Path(folder), num_workers)
    _workers[threading.get_ident()] = peers


def _allreduce(send, reduction: int, in_group: bool, receive) -> None:
    """The first worker of a group takes all parts in the order of their ids: all get one result."""
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
    # By rounds of one speaker, so that nobody waits for a reader that waits to be read.
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
    # Disco puts the name of its library of collectives between the dots; on CPUs it has none.
    "runtime.disco..allreduce": _allreduce,
    "runtime.disco..allgather": _allgather,
    "runtime.disco..broadcast_from_worker0": _broadcast_from_worker0,
    "runtime.disco..send_to_next_group": lambda value: current_worker().send_on(value),
    "runtime.disco..recv_from_prev_group": lambda target: current_worker().receive_into(target),
}
for _name, _function in _FUNCTIONS.items():
    tvm_ffi.register_global_func(_name, _function, override=True)
