# SPDX-License-Identifier: Apache-2.0
"""The interface of a peer for the worker that times it."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from lib.cases import FLUSH_BYTES, Case, Heads, Inputs


class Unsupported(Exception):
    """A peer cannot compute a case."""


@dataclasses.dataclass
class Prepared:
    """A case that is ready to run.

    Parameters
    ----------
    run : callable
    output : callable, optional
        Returns what the last run computed: [rows, query heads, dim], in any dtype.
    before : callable, optional
        Runs before each timed run; None: what flushes the caches.
    calls : int
        Of the peer's function in a run.
    note : str
        Says how the peer computes the case, where the name does not.
    apart : callable, optional
        Runs the case some times and returns which share of the time the first thread to finish
        waits for the last one; None where that is not known.
    num_bytes : int, optional
        K, V, queries and outputs, where they are not all of the case's type.
    """

    run: Callable[[], object]
    output: Callable[[], np.ndarray] | None = None
    before: Callable[[], object] | None = None
    calls: int = 1
    note: str = ""
    apart: Callable[[], float | None] | None = None
    num_bytes: int | None = None


class Peer(ABC):
    """An implementation of attention.

    Parameters
    ----------
    cpus : list of int
        What its threads are bound to, one for each.
    """

    version = ""

    def __init__(self, cpus: list[int]):
        self.cpus = cpus
        self._flush = np.ones(FLUSH_BYTES // 4, np.float32)

    def flush(self) -> None:
        """Read what is larger than the caches: a step of a model leaves no pages there."""
        self._flush.sum()

    @abstractmethod
    def prepare(self, case: Case, inputs: Inputs, dtype: str, heads: Heads) -> Prepared:
        """Lay the inputs out as the peer wants them; `Unsupported` where it cannot."""

    def bind_caller(self) -> None:
        """Bind the thread that calls, after the others have started."""
        os.sched_setaffinity(0, self.cpus[:1])

    def limits(self) -> dict[str, float]:
        """Bytes and flops per second of the machine, if this peer measures them."""
        return {}


def together(parts: list[Prepared]) -> Prepared:
    """Parts of a case one after another, for peers that take sequences of one shape only."""
    if len(parts) == 1:
        return parts[0]

    def run():
        for part in parts:
            part.run()

    return Prepared(
        run,
        lambda: np.concatenate([part.output() for part in parts]),
        calls=sum(part.calls for part in parts),
        note=parts[0].note,
    )
