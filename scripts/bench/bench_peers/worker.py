# SPDX-License-Identifier: Apache-2.0
"""The process of one peer: ``worker.py PEER CPU[,CPU...]`` answers lines of JSON with others."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[2].split(",")])

from lib.cases import Case, Heads, Inputs, seconds_of  # noqa: E402

from bench_peers import PEERS  # noqa: E402
from bench_peers.peer import Unsupported  # noqa: E402


class Worker:
    """Answers requests; holds the case that was prepared last."""

    def __init__(self, peer: str, cpus: list[int]):
        entry = PEERS[peer]
        module = importlib.import_module(f"bench_peers.{entry.module}")
        self.peer = getattr(module, entry.name)(cpus)
        self.prepared = None

    def start(self) -> dict:
        return {"version": self.peer.version}

    def prepare(self, case: dict, dtype: str, heads: dict) -> dict:
        """Prepare a case and run it once."""
        self.prepared = None
        case, heads = Case(**case), Heads(**heads)
        inputs = Inputs(case, dtype, heads)
        try:
            self.prepared = self.peer.prepare(case, inputs, dtype, heads)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        start = time.perf_counter()
        self.prepared.run()
        first = self.first_s = time.perf_counter() - start
        self.peer.bind_caller()
        error = inputs.error(self.prepared.output()) if self.prepared.output else None
        notes = {"calls": self.prepared.calls, "note": self.prepared.note, "error": error}
        if self.prepared.num_bytes is not None:
            notes["bytes"] = self.prepared.num_bytes
        return {"first_s": first, **notes}

    def run(self, budget: float) -> dict:
        """Time the case that was prepared last."""
        before = self.prepared.before or self.peer.flush
        warms_up = self.first_s < budget / 2
        times = seconds_of(self.prepared.run, before, budget, min_runs=1, warms_up=warms_up)
        return {"times_s": times}

    def apart(self) -> dict:
        """Return how far apart the threads finish the case that was prepared last."""
        return {"apart": self.prepared.apart() if self.prepared.apart else None}

    def read(self) -> dict:
        """Bytes per second that can be read just now."""
        return {"read": self.peer.read_bandwidth()}

    def limits(self) -> dict:
        return self.peer.limits()

    def drop(self) -> dict:
        """Give the memory of the case back."""
        self.prepared = None
        return {}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if worker is None:
                worker = Worker(sys.argv[1], [int(cpu) for cpu in sys.argv[2].split(",")])
            reply = getattr(worker, name)(**request)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            reply = {"failed": " ".join(text.split())[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
