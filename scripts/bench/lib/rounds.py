# SPDX-License-Identifier: Apache-2.0
"""Times of several runs, alternating with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from lib.cases import FLUSH_BYTES


class Rounds:
    """Seconds of several runs in rounds, each run with caches that hold other data."""

    def __init__(self, budget: float):
        self.budget = budget
        self.flush = np.ones(FLUSH_BYTES // 4, np.float32)

    def seconds_of(self, runs: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Times of each run: as many as fit the budget, at least five."""
        times: list[list[float]] = [[] for _ in runs]
        for run in runs:
            run()
        end = time.perf_counter() + self.budget
        while len(times[0]) < 5 or time.perf_counter() < end:
            for run, taken in zip(runs, times, strict=True):
                self.flush.sum()
                start = time.perf_counter()
                run()
                taken.append(time.perf_counter() - start)
        return times


def columns_of(times: Sequence[list[float]]) -> str:
    """The median of each run, the fastest in brackets."""
    return " ".join(
        f"{statistics.median(taken) * 1e3:8.3f} ms ({min(taken) * 1e3:8.3f})" for taken in times
    )


def ratio_of(times: Sequence[list[float]]) -> float:
    """Return the ratio of the second run's median to the first one's."""
    return statistics.median(times[1]) / statistics.median(times[0])
