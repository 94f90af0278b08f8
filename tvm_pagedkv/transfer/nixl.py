# SPDX-License-Identifier: Apache-2.0
"""`NixlChannel`: the receiver reads the sender's pages through NIXL."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import uuid
from typing import Any

import numpy as np

from ..cache import KVCache, page_groups
from . import _runtime, clock
from .channel import ChannelClosed, TransferError, TransferTimeout
from .layout import pools_of
from .sockets import SocketChannel

_POLL_SECONDS = 20e-6


def _api() -> Any:
    try:
        from nixl_cu12 import _api as api  # `import nixl` would import torch
    except ImportError:
        raise ImportError(
            "NixlChannel needs NIXL; install it with: pip install 'tvm-pagedkv[nixl]'"
        ) from None
    return api


def use_loopback() -> None:
    """Restrict NIXL to this host; call it before the first `NixlChannel` is made."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")


class NixlChannel(SocketChannel):
    """A channel between two processes, on one host or two, with messages over a socket.

    All pages are registered once, and the receiver reads rows directly into its own pages. A reader
    cannot tell whether a read came too late, when the sender had already released the memory. So
    each read carries a tag with the connection's generation and its block, and the sender confirms
    it only after NIXL has notified it of the tag while the block was still pinned.

    Raises
    ------
    ImportError
        If NIXL is not installed.
    """

    def __init__(self, connection: socket.socket) -> None:
        api = _api()
        super().__init__(connection)
        self._name = f"tvm_pagedkv-{uuid.uuid4().hex}"
        self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
        self._registered: Any = None
        self._cache: KVCache | None = None
        self._remote = ""  # the sender's agent
        self._generation = ""
        self._bases = np.zeros((0, 2), np.uint64)  # per layer: own, peer's
        self._sizes = np.zeros((0, 2), np.int64)
        self._notifications: set[bytes] = set()

    def expose(self, cache: KVCache) -> dict[str, Any]:
        pools = self._register(cache)
        self._generation = uuid.uuid4().hex
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        described = {"kind": "nixl", "metadata": metadata, "generation": self._generation}
        return described | {"layers": pools}

    def attach(self, cache: KVCache, memory: dict[str, Any]) -> None:
        if memory.get("kind") != "nixl":
            raise ValueError(f"a NixlChannel cannot read memory of kind {memory.get('kind')!r}")
        theirs = pools_of(memory, len(page_groups(cache)))
        ours = self._register(cache)
        self._generation = str(memory.get("generation"))
        both = np.array([ours, theirs], np.uint64)  # [side, layer, (address, size)]
        self._bases, self._sizes = both[..., 0].T, both[..., 1].T.astype(np.int64)
        try:
            remote = self._agent.add_remote_agent(base64.b64decode(memory["metadata"]))
        except Exception as error:  # NIXL has its own types
            raise TransferError(f"NIXL cannot reach the sender: {error}") from None
        self._remote = remote.decode() if isinstance(remote, bytes) else remote

    def read(self, regions: dict[int, np.ndarray], tag: str, timeout: float) -> None:
        if self._cache is None:
            raise ChannelClosed("the channel is closed")
        local, remote = self._descriptors(regions)
        if not len(local):
            return self._notify(tag)
        end, handle = clock.now() + timeout, None
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, "DRAM"),
                self._remote,
                self._notification(tag),
            )
            state = self._agent.transfer(handle)
            while state == "PROC":
                if clock.now() > end:
                    raise TransferTimeout(f"NIXL did not read {local[:, 1].sum()} bytes in time")
                clock.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransferError(f"NIXL could not read from the sender: state {state}")
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            self._stop(handle)  # a pending read must not write any more
            self.close()
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"NIXL could not read from the sender: {error}") from None

    def was_read(self, tag: str, timeout: float) -> bool:
        wanted, end = self._notification(tag), clock.now() + timeout
        while wanted not in self._notifications:
            for messages in self._agent.get_new_notifs().values():
                self._notifications.update(messages)
            if wanted not in self._notifications:
                if clock.now() > end:
                    return False
                clock.sleep(_POLL_SECONDS)
        self._notifications.discard(wanted)
        return True

    def close(self) -> None:
        super().close()
        if self._agent is not None:
            self._stop(None)

    # --- inside ---------------------------------------------------------------------------------

    def _register(self, cache: KVCache) -> list[tuple[int, int]]:
        if str(cache.description["device"]).partition(":")[0] != "cpu":
            raise ValueError("a NixlChannel serves caches on the CPU")
        pools = [_runtime.pool_address(cache, i) for i in range(len(page_groups(cache)))]
        descriptors = [(address, size, 0, "") for address, size in pools]
        self._registered = self._agent.register_memory(descriptors, "DRAM")
        self._cache = cache  # its memory must outlive the registration
        return pools

    def _descriptors(self, regions: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return address, size and device of each region, on both sides."""
        sides: tuple[list, list] = ([], [])
        for layer, rows in regions.items():
            for side in range(2):
                offset, length = rows[:, side], rows[:, 2]
                if np.any((offset < 0) | (offset > self._sizes[layer, side] - length)):
                    raise TransferError(f"rows outside the pages of layer {layer}")
                address = offset.astype(np.uint64) + self._bases[layer, side]
                device = np.zeros_like(address)
                sides[side].append(np.stack([address, length.astype(np.uint64), device], 1))
        return np.concatenate(sides[0]), np.concatenate(sides[1])

    def _notification(self, tag: str) -> bytes:
        return f"{self._generation}:{tag}".encode()

    def _notify(self, tag: str) -> None:
        self._agent.send_notif(self._remote, self._notification(tag))

    def _stop(self, handle: Any) -> None:
        """Release the agent and its registrations."""
        agent, self._agent, self._cache = self._agent, None, None
        if agent is None:
            return
        # Any of these fails if the peer is gone; the next one is still needed.
        if handle is not None:
            with contextlib.suppress(Exception):
                agent.release_xfer_handle(handle)
        if self._remote:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(self._remote)
        if self._registered is not None:
            with contextlib.suppress(Exception):
                agent.deregister_memory(self._registered)
