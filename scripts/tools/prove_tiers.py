# SPDX-License-Identifier: Apache-2.0
"""Prove that the tiers of the prefix cache never give wrong data, by many random steps.

Processes use caches over one folder, one or two at a time. They are killed by SIGKILL at random
moments and started again; clocks jump; files and host memory are damaged. K and V of a position are
a function of the tokens up to it, so the right content of each page is known. Pages may be missing.
Ends with status 1 at the first page that is wrong, and when a process crashes or hangs.

    python scripts/tools/prove_tiers.py                        # a million steps: about 10 minutes
    python scripts/tools/prove_tiers.py --steps 20000 --valkey valkey://127.0.0.1:6379

The seed decides the steps of each process. When it is killed, and how fast the store is, it does
not, so a run repeats only roughly.
"""

from __future__ import annotations

import time

from tier_faults import Clock, Damage

CLOCK = Clock()
time.monotonic, time.time = CLOCK.monotonic, CLOCK.time  # before others take them

import argparse  # noqa: E402
import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import logging  # noqa: E402
import mmap  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import numpy as np  # noqa: E402
from tier_world import World  # noqa: E402

from tvm_pagedkv.stores import DiskStore, GuardedStore, TieredStore, ValkeyStore  # noqa: E402

DISK_BYTES = 4 << 20
FAR_PREFIX = "prove_tiers:"
MAX_SECONDS = 1.0  # of a life that is killed
HANG_SECONDS = 120.0
REPORT_SECONDS = 10.0
COUNTS = (
    "steps", "lookups", "checked_pages", "pool_tokens", "host_tokens", "store_tokens",
    "damaged_values", "jumps", "host_damages", "full", "refused_folders",
)  # fmt: skip


class Counts:
    """Counters in memory that a process shares with its parent, so that a kill loses none."""

    def __init__(self) -> None:
        self._values = np.frombuffer(mmap.mmap(-1, 8 * len(COUNTS)), np.int64)

    def __getitem__(self, name: str) -> int:
        return int(self._values[COUNTS.index(name)])

    def add(self, name: str, count: int = 1) -> None:
        self._values[COUNTS.index(name)] += count


class Setup(NamedTuple):
    """Settings that all processes of a run share."""

    folder: Path
    valkey: str | None
    has_liars: bool


def open_store(setup: Setup, counts: Counts):
    """Open the folder as a store, before a server if there is one.

    A folder whose index is damaged is refused with a ValueError that says what to do: remove it.
    """
    try:
        disk = DiskStore(setup.folder, DISK_BYTES, num_threads=2)
    except ValueError:
        counts.add("refused_folders")
        shutil.rmtree(setup.folder, ignore_errors=True)
        disk = DiskStore(setup.folder, DISK_BYTES, num_threads=2)
    if setup.valkey is None:
        return disk
    far = ValkeyStore(setup.valkey, prefix=FAR_PREFIX, timeout=0.5)
    return TieredStore([disk, GuardedStore(far, deadline=0.5, pause=0.2)])


def live(seed: str, setup: Setup, num_steps: int, counts: Counts) -> None:
    """Use a cache for some steps and end it in order."""
    sys.setswitchinterval(2e-4)  # the store's thread makes steps wait for 5 ms otherwise
    draw = random.Random(seed)
    for attempt in range(5):
        try:
            store = open_store(setup, counts)
            break
        except (OSError, ValueError):  # another process has just removed the folder, or damaged it
            if attempt == 4:
                return
            time.sleep(0.01)
    lies = setup.has_liars and draw.random() < 0.5
    world = World(draw, store, CLOCK, counts, lies)
    for _ in range(num_steps):
        world.step()
        counts.add("steps")
    world.end(HANG_SECONDS / 2)


class Process:
    """A child that lives once."""

    def __init__(self, seed: str, setup: Setup, num_steps: int) -> None:
        self.seed, self.counts = seed, Counts()
        self.was_killed = False
        self._report, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write_end)
            return
        faulthandler.register(signal.SIGUSR1, file=write_end, all_threads=True)
        status = 1
        try:
            live(seed, setup, num_steps, self.counts)
            status = 0
        except BaseException:
            os.write(write_end, traceback.format_exc().encode()[-8000:])
        finally:
            os._exit(status)

    def end(self, seconds: float | None) -> str:
        """Wait for the process; kill it after some seconds, or None: if it does nothing for long.

        Returns
        -------
        str
            What went wrong, or nothing.
        """
        is_hanging = False
        since, num_steps = CLOCK.real(), 0
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            now = CLOCK.real()
            if seconds is None and self.counts["steps"] > num_steps:
                since, num_steps = now, self.counts["steps"]
            if now > since + (HANG_SECONDS if seconds is None else seconds):
                is_hanging = seconds is None
                if is_hanging:
                    os.kill(self.pid, signal.SIGUSR1)  # tells where it is
                    time.sleep(1.0)
                os.kill(self.pid, signal.SIGKILL)
                self.was_killed = True
                _, status = os.waitpid(self.pid, 0)
                break
            time.sleep(0.002)
        with os.fdopen(self._report) as report:
            text = report.read()
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) != signal.SIGKILL:
                text += f"it died of signal {os.WTERMSIG(status)}"
            elif is_hanging:
                text += f"it did nothing for {HANG_SECONDS:.0f} s"
        elif os.WEXITSTATUS(status) and not text:
            text = f"it ended with status {os.WEXITSTATUS(status)}"
        return text and f"process {self.seed!r}: {text}"


class Proof:
    """Lives over one folder, and what was counted."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.draw = random.Random(str(seed))
        self.seed, self.setup = seed, setup
        self.damage = Damage(self.draw, setup.folder, setup.valkey, FAR_PREFIX)
        self.counts = dict.fromkeys((*COUNTS, "processes", "kills"), 0)

    def life(self, max_steps: int) -> str:
        """Run one or two processes; return what went wrong, or nothing."""
        count = 2 if self.draw.random() < 0.3 else 1
        number = self.counts["processes"]
        processes = []
        for i in range(count):
            steps = min(self.draw.choice((50, 500, 5000)), max_steps // count + 1)
            seed = f"{self.seed}/{number + i}"
            processes.append(Process(seed, self.setup, steps))
        faults = []
        for process in processes:
            is_killed = self.draw.random() < 0.8
            seconds = MAX_SECONDS * self.draw.random() ** 2 if is_killed else None
            if self.draw.random() < 0.1:
                self.damage.once()  # under running processes
            faults.append(process.end(seconds))
            self.counts["processes"] += 1
            self.counts["kills"] += process.was_killed
            for name in COUNTS:
                self.counts[name] += process.counts[name]
        if self.draw.random() < 0.5:
            for _ in range(self.draw.randint(1, 3)):
                self.damage.once()
        return "\n".join(filter(None, faults))

    def report(self) -> None:
        counts = self.counts | {"damages": sum(self.damage.counts.values())}
        print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn")
    parser.add_argument("--folder", help="where the store's folder goes; default: temporary files")
    parser.add_argument("--valkey", metavar="URL", help="a server below the folder")
    parser.add_argument(
        "--liars",
        action="store_true",
        help="let half of the processes write rows of another model: the proof must fail",
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("tvm_pagedkv").setLevel(logging.CRITICAL)  # damage is expected
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        proof = Proof(seed, Setup(Path(folder) / "store", options.valkey, options.liars))
        next_report = CLOCK.real()
        fault = ""
        while proof.counts["steps"] < options.steps and not fault:
            fault = proof.life(options.steps - proof.counts["steps"])
            if CLOCK.real() > next_report:
                proof.report()
                next_report = CLOCK.real() + REPORT_SECONDS
        proof.report()
    print("damages:", ", ".join(f"{count} {name}" for name, count in proof.damage.counts.items()))
    if fault:
        print(f"FAULT with seed {seed}\n{fault}")
        return 1
    unused = [name for name in COUNTS[:6] if not proof.counts[name]]
    if unused and options.steps >= 1500:
        print(f"nothing was proven about {', '.join(unused)}")
        return 1
    print("no page was wrong")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
