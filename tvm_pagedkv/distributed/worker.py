# SPDX-License-Identifier: Apache-2.0
"""`Worker`: what a worker of a Disco session knows, and the sockets to the other workers."""

from __future__ import annotations

import math
import socket
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_CONNECT_TIMEOUT_S = 120.0
_LENGTH_BYTES = 4


class Worker:
    """A worker: its rank, its sockets by the rank of the other worker, and the model's state."""

    def __init__(self, rank: int, num_workers: int, num_groups: int):
        self.rank, self.num_workers = rank, num_workers
        self.group_size = num_workers // num_groups
        self.group, self.num_groups = rank // self.group_size, num_groups
        self.sockets: dict[int, socket.socket] = {}
        self.has_lost_peer = False  # whether a call failed because another worker had failed
        self.state: Any = None

    @property
    def shard(self) -> int:
        """The worker's rank within its group."""
        return self.rank % self.group_size

    @property
    def members(self) -> range:
        """The ranks of the workers of this worker's group."""
        return range(self.group * self.group_size, (self.group + 1) * self.group_size)

    def connect(self, folder: Path) -> None:
        """Connect to every other worker, anew if it was before; the higher rank dials."""
        self.close()
        self.sockets.clear()
        self.has_lost_peer = False
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_CONNECT_TIMEOUT_S)
            listener.bind(str(folder / f"{self.rank}.new"))
            listener.listen(self.num_workers)
            (folder / f"{self.rank}.new").rename(folder / str(self.rank))
            for other in range(self.rank):
                self.sockets[other] = _call(folder / str(other), self.rank)
            for _ in range(self.rank + 1, self.num_workers):
                peer, _ = listener.accept()
                peer.settimeout(None)
                self.sockets[int.from_bytes(_receive(peer, _LENGTH_BYTES), "little")] = peer

    def close(self) -> None:
        """Close all sockets; workers that wait for this one then fail."""
        for peer in self.sockets.values():
            peer.close()

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        for other in self.sockets:
            self._send_bytes(other, b"\0")
        for other in self.sockets:
            self._receive_bytes(other, 1)

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
        received = self._receive_bytes(
            self.rank - self.group_size, math.prod(target.shape) * target.dtype.itemsize
        )
        if str(target.dtype) == "bfloat16":
            target.copyfrom(np.frombuffer(received, ml_dtypes.bfloat16).reshape(target.shape))
        else:
            host_array(target).reshape(-1).view(np.uint8)[:] = received

    def send(self, to: int, array: np.ndarray) -> None:
        """Send the elements of an array to another worker."""
        self._send_bytes(to, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def receive(self, sender: int, like: np.ndarray) -> np.ndarray:
        """Receive an array with the shape and dtype of `like` from another worker."""
        data = self._receive_bytes(sender, like.nbytes)
        return np.frombuffer(data, like.dtype).reshape(like.shape)

    def _send_bytes(self, to: int, data: bytes | memoryview) -> None:
        try:
            self.sockets[to].sendall(data)
        except OSError:
            self.has_lost_peer = True
            raise

    def _receive_bytes(self, sender: int, num_bytes: int) -> bytearray:
        try:
            return _receive(self.sockets[sender], num_bytes)
        except OSError:
            self.has_lost_peer = True
            raise


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


def host_array(tensor) -> np.ndarray:
    """View a CPU tensor as a NumPy array.

    Raises
    ------
    TypeError
        If its type is bfloat16, which NumPy's DLPack does not have.
    """
    if str(tensor.dtype) == "bfloat16":
        raise TypeError("collectives on CPUs do not support bfloat16; convert to float32")
    return np.from_dlpack(tensor)


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


def enter(worker: Worker) -> None:
    """Make this thread run `worker`."""
    _workers[threading.get_ident()] = worker


def leave() -> Worker | None:
    """Return the worker of this thread, which is none from now on."""
    return _workers.pop(threading.get_ident(), None)
