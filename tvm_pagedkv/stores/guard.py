# SPDX-License-Identifier: Apache-2.0
"""`GuardedStore`: a store that cannot hang its caller, and that is left alone while it fails."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._checks import check_int, check_positive
from .breaker import CircuitBreaker
from .interface import PageStore
from .memory import check_batch, check_keys, view

_log = logging.getLogger(__name__)
_ALIGNMENT = 4096


class _Job:
    """A call that a worker thread makes."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self._function(*self._arguments)
        except BaseException as error:  # whatever it is, the caller gets it
            self.error = error
        self.done.set()


def _work(jobs: queue.SimpleQueue[_Job | None], buffer: memoryview) -> None:
    """Make calls one after the other; `buffer` stays alive as long as they may use it."""
    while (job := jobs.get()) is not None:
        job.run()


class GuardedStore:
    """A store with a deadline for each call and a circuit breaker.

    A thread of the guard calls the store, with memory of the guard: values are copied from and to
    the caller's memory. So a call that has missed its deadline can go on for as long as it
    likes, and nothing that it still reads or writes is the caller's. Until it returns, the guard
    answers misses and makes no other call.

    After several failures in a row the guard *opens*: it answers misses for a while, without a
    call. Then one call tries the store; the guard closes when it succeeds, or stays open for
    another while. A failure is an exception, a missed deadline, or a reply that is not a list of
    the right length. Calls of a guarded store raise for wrong arguments only.

    Parameters
    ----------
    store : PageStore
    deadline : float
        Seconds for each call.
    failures : int
        Failures in a row that open the guard.
    pause : float
        Seconds until the next try.
    buffer_bytes : int
        Memory of the guard. Larger batches are split, larger values are misses.
    clock : callable
        Returns seconds that never go back.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        deadline: float = 1.0,
        failures: int = 3,
        pause: float = 10.0,
        buffer_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline = check_positive("deadline", deadline)
        check_int("failures", failures)
        self._pause = check_positive("pause", pause)
        check_int("buffer_bytes", buffer_bytes, _ALIGNMENT, 2**40)
        self._clock = clock
        self._store = store
        self._name = type(store).__name__
        self._process = os.getpid()
        self._is_closed = False
        self._buffer = memoryview(mmap.mmap(-1, buffer_bytes))
        self._address = np.frombuffer(self._buffer, np.uint8).ctypes.data
        self._late: _Job | None = None  # missed its deadline and has not returned
        self._breaker = CircuitBreaker(failures, self._pause, self._pause, clock)
        self._counts = dict.fromkeys(("calls", "failures", "timeouts", "refused", "opened"), 0)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(
            target=_work,
            args=(self._jobs, self._buffer),
            name=f"pagedkv-guard-{self._name}",
            daemon=True,
        ).start()
        weakref.finalize(self, self._jobs.put, None)
        self._call(store.register, self._address, buffer_bytes)

    @property
    def is_open(self) -> bool:
        """Whether calls are answered without the store."""
        return self._breaker.is_open

    def stats(self) -> dict[str, int]:
        """Return counts of calls.

        Returns
        -------
        dict
            ``calls`` of the store, of which ``failures``, of which ``timeouts``; ``refused`` calls,
            answered without the store; how often the guard was ``opened``.
        """
        return dict(self._counts)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the store has a value; misses while it fails."""
        check_keys(keys)
        self._check_usable()
        return self._ask(len(keys), self._clock() + self._deadline, self._store.exists, list(keys))

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values to addresses; misses while the store fails."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        end = self._clock() + self._deadline
        for indices, starts in self._batches(sizes):
            hits = self._values(self._store.get_into, keys, sizes, indices, starts, end)
            for i, start, hit in zip(indices, starts, hits, strict=True):
                if hit:
                    view(addresses[i], sizes[i])[:] = self._buffer[start : start + sizes[i]]
                results[i] = hit
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values; False for all while the store fails."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        end = self._clock() + self._deadline
        for indices, starts in self._batches(sizes):
            if not self._may_call():
                self._counts["refused"] += 1
                break
            for i, start in zip(indices, starts, strict=True):
                self._buffer[start : start + sizes[i]] = view(addresses[i], sizes[i])
            kept = self._values(self._store.put_from, keys, sizes, indices, starts, end)
            for i, is_kept in zip(indices, kept, strict=True):
                results[i] = is_kept
        return results

    def register(self, address: int, size: int) -> None:
        """Do nothing: the store sees the guard's memory only, which is registered."""

    def close(self) -> None:
        """Close the store, within the deadline or else when a late call returns."""
        if self._is_closed:
            return
        self._is_closed = True
        job = _Job(self._store.close, ())
        self._jobs.put(job)
        self._jobs.put(None)
        job.done.wait(self._deadline)

    def _batches(self, sizes: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield values that fit into the buffer together: their indices, and where each starts."""
        indices: list[int] = []
        starts: list[int] = []
        at = 0
        for i, size in enumerate(sizes):
            if size > len(self._buffer):
                continue
            if at + size > len(self._buffer):
                yield indices, starts
                indices, starts, at = [], [], 0
            indices.append(i)
            starts.append(at)
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        if indices:
            yield indices, starts

    def _values(
        self,
        function: Callable[..., list[bool]],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        indices: list[int],
        starts: list[int],
        end: float,
    ) -> list[bool]:
        return self._ask(
            len(indices),
            end,
            function,
            [keys[i] for i in indices],
            [self._address + start for start in starts],
            [sizes[i] for i in indices],
        )

    def _ask(
        self, count: int, end: float, function: Callable[..., list[bool]], *arguments: Any
    ) -> list[bool]:
        """Return the reply of a call of the store, or misses."""
        if not count:
            return []
        if not self._may_call():
            self._counts["refused"] += 1
            return [False] * count
        reply = self._call(function, *arguments, seconds=end - self._clock(), count=count)
        return [False] * count if reply is None else reply

    def _may_call(self) -> bool:
        if self._late is not None:
            if not self._late.done.is_set():
                return False
            self._late = None
        return self._breaker.may_call

    def _call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float | None = None,
        count: int | None = None,
    ) -> Any:
        """Return the result of a call, or None if it fails."""
        self._counts["calls"] += 1
        job = _Job(function, arguments)
        self._jobs.put(job)
        if not job.done.wait(max(0.0, self._deadline if seconds is None else seconds)):
            self._late = job
            self._counts["timeouts"] += 1
            self._fail(f"no answer in {self._deadline:g} s")
        elif job.error is not None:
            self._fail(f"{type(job.error).__name__}: {job.error}")
        elif count is not None and not (isinstance(job.result, list) and len(job.result) == count):
            self._fail(f"a reply that is not a list of {count} results")
        else:
            self._succeed()
            return job.result
        return None

    def _succeed(self) -> None:
        if self._breaker.succeed():
            _log.warning("%s works again", self._name)

    def _fail(self, reason: str) -> None:
        self._counts["failures"] += 1
        if self._breaker.fail():
            self._counts["opened"] += 1
            _log.warning(
                "%s is unavailable; retrying every %g s: %s", self._name, self._pause, reason
            )

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ValueError("the GuardedStore is closed")
        if os.getpid() != self._process:
            raise RuntimeError("a GuardedStore cannot be used after a fork; make one in the child")
