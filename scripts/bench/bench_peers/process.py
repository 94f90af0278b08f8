# SPDX-License-Identifier: Apache-2.0
"""A peer's process, seen from the benchmark: ask it, and live with its death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench_peers import PEERS

PATIENCE_S = 120  # of one request: compiling included


class PeerFailed(Exception):
    """A peer could not start, raised an error, crashed or hung."""


def environment_for(peer: str, cpus: list[int]) -> dict[str, str]:
    """Return the variables for a peer's number of threads, their CPUs, and huge pages.

    OpenMP binds the thread that loads it, which TVM's pool would take for all CPUs that there are.
    Large allocations of glibc ask for huge pages, on which the pages of TVM's peers lie: so do
    those of torch, ONNX Runtime and OpenVINO then, which ask for none themselves.
    """
    count = str(len(cpus))
    own = {"TVM_NUM_THREADS": count, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": "1"}
    own |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    if PEERS[peer].has_openmp:
        places = ",".join(f"{{{cpu}}}" for cpu in cpus)
        own |= {"OMP_PROC_BIND": "true", "OMP_PLACES": places}
    return os.environ | own


class PeerProcess:
    """A peer in a process of its own, which starts at the first request and again after a crash.

    Parameters
    ----------
    peer : str
        One of `PEERS`.
    cpus : list of int
        For its threads.
    python : str
        The interpreter of the environment that the peer is installed in.
    """

    def __init__(self, peer: str, cpus: list[int], python: str = sys.executable):
        self.peer, self._cpus, self._python = peer, cpus, python
        self._process = None

    def ask(self, do: str, **arguments) -> dict:
        """Send a request and return the reply; `PeerFailed` says why there is none."""
        if self._process is None:
            self._start()
        timer = threading.Timer(PATIENCE_S, self._process.kill)
        timer.start()
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerFailed(self._obituary())
        reply = json.loads(line)
        if "failed" in reply:
            raise PeerFailed(reply["failed"])
        return reply

    def _start(self) -> None:
        worker = Path(__file__).with_name("worker.py")
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [self._python, str(worker), self.peer, ",".join(map(str, self._cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment_for(self.peer, self._cpus),
        )

    def _obituary(self) -> str:
        code = self._process.wait()
        self._process = None
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"its process ended with {code}" + (f": {lines[-1][:300]}" if lines else "")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
