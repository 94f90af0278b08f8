# SPDX-License-Identifier: Apache-2.0
"""Measures cases with the peers' processes alternating, and keeps what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

from bench_peers import PEERS
from bench_peers.process import PeerFailed, PeerProcess

from lib.cases import Case, Heads
from lib.shares import is_steady, summary_of

ROUNDS = 3
SLOW_S = 0.6  # of one peer's runs: no further round
SETTLE_S = 0.02  # threads of the peer before spin for a while
MORE_ROUNDS = 3  # at most, instead of those that the read bandwidth changed in


class Measurement:
    """Records of what was measured, reasons for what was not, and the limits between.

    Parameters
    ----------
    peers : name -> PeerProcess
        Those that have started; "ours" is among them.
    budget : float
        Seconds for each peer and case.
    longest : float
        Cases that would take a peer longer are left out, which its former cases tell.
    progress : callable
        Takes a line of text.
    shows_balance : bool
        Whether to ask the peers how far apart their threads finish.
    """

    def __init__(
        self,
        peers: dict[str, PeerProcess],
        budget: float,
        longest: float,
        progress: Callable[[str], None],
        shows_balance: bool = False,
    ):
        self.shows_balance = shows_balance
        self.peers, self.budget, self.longest, self.progress = peers, budget, longest, progress
        self.records: list[dict] = []
        self.absent: list[dict] = []
        self.limits: list[dict[str, float]] = []
        self._pace: dict[tuple[str, str, str], float] = {}

    def measure(self, case: Case, dtype: str, heads: Heads, longest: float | None = None) -> None:
        """Time a case with every peer, in rounds, and what the machine can read between the rounds.

        What takes a second is measured once, and what is slow in fewer rounds. A round is measured
        again where the read bandwidth changed during our own.
        """
        self.progress(f"{dtype} {heads.label} {case.label}")
        key = {"dtype": dtype, "heads": dataclasses.asdict(heads), "case": case.label}
        times, about = {}, {}
        for name, peer in self.peers.items():
            first = self._prepare(name, peer, case, dtype, heads, longest or self.longest, key)
            if first is None:
                continue
            told = ("calls", "note", "error", "bytes")
            about[name] = {x: first[x] for x in told if x in first}
            slow = first["first_s"] > 1
            times[name] = [first["first_s"]] if slow else []
        takes_part = [name for name in times if not times[name]]
        rounds = {name: [] for name in times}
        for number in range(ROUNDS + MORE_ROUNDS):
            due = [x for x in takes_part if sum(times[x]) < max(SLOW_S, self.budget)]
            steady = sum(is_steady(each["reads"]) for each in rounds.get("ours", []))
            if number >= ROUNDS and (steady >= ROUNDS or "ours" not in due):
                break
            after = self._read_bandwidth()
            for name in due:
                time.sleep(SETTLE_S)
                try:
                    taken = self.peers[name].ask("run", budget=self.budget / ROUNDS)["times_s"]
                except PeerFailed as failure:
                    takes_part.remove(name)
                    self._leave_out(name, key, str(failure))
                    continue
                before, after = after, self._read_bandwidth()
                times[name] += taken
                rounds[name].append({"min_s": min(taken), "reads": [before, after]})
        for name in times:
            with contextlib.suppress(PeerFailed):
                if self.shows_balance:
                    about[name] |= self.peers[name].ask("apart")
                self.peers[name].ask("drop")
        limits = self.peers["ours"].ask("limits")
        self.limits.append(limits)
        work = {"bytes": case.num_bytes(dtype, heads), "flops": case.flops(heads)}
        for name, taken in times.items():
            if taken:
                pace, kind = min(taken) / max(work["flops"], 1), (name, dtype, case.kind)
                self._pace[kind] = max(pace, self._pace.get(kind, 0.0))
                own = {"min_s": min(taken), "median_s": statistics.median(taken), "n": len(taken)}
                record = {"peer": name, "kind": case.kind, **key, **work, **own, **about[name]}
                once = [{"min_s": min(taken), "reads": [limits["read"]]}]
                self.records.append(record | summary_of(rounds[name] or once))

    def _read_bandwidth(self) -> float:
        """Bytes per second that the machine can read just now."""
        time.sleep(SETTLE_S)
        return self.peers["ours"].ask("read")["read"]

    def _prepare(self, name, peer, case, dtype, heads, longest, key) -> dict | None:
        expected = self._pace.get((name, dtype, case.kind), 0.0) * case.flops(heads)
        if expected > longest:
            self._leave_out(name, key, f"it would take about {expected:.1f} s a run")
            return None
        try:
            first = peer.ask(
                "prepare",
                case=dataclasses.asdict(case),
                dtype=dtype,
                heads=dataclasses.asdict(heads),
            )
        except PeerFailed as failure:
            self._leave_out(name, key, str(failure))
            return None
        if "unsupported" in first:
            self._leave_out(name, key, first["unsupported"])
            return None
        return first

    def _leave_out(self, peer: str, key: dict, reason: str) -> None:
        self.absent.append({"peer": peer, **key, "reason": reason})

    @property
    def best_limits(self) -> dict[str, float]:
        """Bytes per second of reading; flops per second of each type's products."""
        best = {name: max(x[name] for x in self.limits) for name in self.limits[0]}
        return best | {"float16": best["float32"]}  # converted, then multiplied as float32


def start_peers(
    names: list[str], cpus: list[int], pythons: dict[str, str]
) -> tuple[dict[str, PeerProcess], dict[str, str], dict[str, str]]:
    """Start the peers: their processes, their versions, and why some are not here."""
    processes, versions, missing = {}, {}, {}
    for name in names:
        process = PeerProcess(name, cpus, *filter(None, [pythons.get(name)]))
        try:
            versions[name] = process.ask("start")["version"]
            processes[name] = process
        except (PeerFailed, OSError) as failure:
            process.close()
            missing[name] = f"{failure}; get it: {PEERS[name].how_to_get}"
    return processes, versions, missing
