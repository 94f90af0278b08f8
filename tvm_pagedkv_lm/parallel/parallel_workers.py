# SPDX-License-Identifier: Apache-2.0
"""`Workers`: the workers of a `ParallelModel`, which run commands and answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import tvm_ffi

from tvm_pagedkv import CacheFullError
from tvm_pagedkv.distributed import deferred_interrupts, forget, reconnect

_ERRORS = {
    error.__name__: error
    for error in (ValueError, KeyError, IndexError, TypeError, MemoryError, CacheFullError)
}


class Outcome(NamedTuple):
    """What each worker has answered to a command.

    Attributes
    ----------
    values : list
        The result of each worker; None of one that failed.
    errors : list of (str, str)
        Type and text of the error of each worker that failed.
    """

    values: list[Any]
    errors: list[tuple[str, str]]

    @property
    def is_partial(self) -> bool:
        """Whether some workers have failed and others have not."""
        return 0 < len(self.errors) < len(self.values)

    def result(self) -> list[Any]:
        """Return the results, or raise the error of the worker that failed."""
        if not self.errors:
            return self.values
        # A worker that lost its connection is not the one that failed.
        errors = self.errors
        name, text = next((x for x in errors if x[0] != ConnectionError.__name__), errors[0])
        raise _ERRORS.get(name, RuntimeError)(text)


class Workers:
    """A Disco session whose workers each have a `ModelWorker`.

    Once a worker process has ended, every call raises a RuntimeError that says so. The workers end
    with `close`, when nothing refers to this object, or with the process. Calls of several threads
    follow one another.

    Parameters
    ----------
    session : tvm.runtime.disco.Session
    timeout : float, optional
        Seconds that a call waits for the worker processes before it ends them; None: no limit.
    """

    def __init__(self, session: Any, timeout: float | None = None):
        run = session.get_global_func("tvm_pagedkv_lm.run_worker")
        self._held = {"session": session, "run": run}
        self._timeout = timeout
        self._processes: list[int] = []
        self._failure = ""  # why no worker can be used any more
        self._calls = threading.RLock()  # a finalizer may make a call within another one
        self._dropped: deque[int] = deque()  # caches that nothing refers to
        self.close = weakref.finalize(self, _end, self._held, self._calls)

    @property
    def session(self):
        """The session; a RuntimeError once it is closed."""
        return self._part("session")

    def load(self, options: str) -> None:
        """Let every worker load its part of the model, however long that takes."""
        with self._calls, deferred_interrupts():
            load = self.session.get_global_func("tvm_pagedkv_lm.load_worker")
            self._processes = self._outcome(load(options)).result()

    def call(self, command: str, *args: Any) -> list[Any]:
        """Run a method of `ModelWorker` on all workers; return the result of each."""
        return self.try_call(command, *args).result()

    def try_call(self, command: str, *args: Any) -> Outcome:
        """Run a method of `ModelWorker` on all workers; return the result or error of each."""
        with self._waiting():
            return self._outcome(self._part("run")(command, *args))

    def step(self, *args: Any) -> Outcome:
        """Run `ModelWorker.step` on all workers. If it fails on all, no cache has changed."""
        with self._waiting():
            outcome = self._outcome(self._part("run")("step", *args))
            if outcome.errors:
                self._reconnect()
            return outcome

    def drop_cache(self, cache_id: int) -> None:
        """Free a cache, now or with the next call.

        Finalizers call this. One may run in any thread, also in that of worker 0 while it answers a
        call, which would wait for itself.
        """
        self._dropped.append(cache_id)
        if self._calls.acquire(blocking=False):
            try:
                with contextlib.suppress(RuntimeError), self._waiting():
                    pass  # a worker may have ended, and with it its caches
            finally:
                self._calls.release()

    def _reconnect(self) -> None:
        """Connect the workers anew, all of which have closed their sockets and answered."""
        try:
            reconnect(self.session)
        except RuntimeError as error:
            self._failure = f"{error}; load the model again"

    def call_first(self, command: str, *args: Any) -> Any:
        """Run a method of `ModelWorker` on all workers; return an object of worker 0.

        Worker 0 is in this process.
        """
        with self._waiting():
            return self._part("run")(command, *args).debug_get_from_remote(0)

    def _part(self, name: str) -> Any:
        if not self._held:
            raise RuntimeError("the model is closed: its workers have ended")
        if self._failure:
            raise RuntimeError(self._failure)
        return self._held[name]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let a call wait for the workers, no longer than the timeout."""
        with self._calls, deferred_interrupts(), self._deadline():
            while self._dropped:
                self._outcome(self._part("run")("drop_cache", self._dropped.popleft()))
            yield

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        if self._timeout is None:
            yield
            return
        timer = threading.Timer(self._timeout, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        """End the worker processes, so that what waits for them fails."""
        self._failure = (
            f"the workers have not answered within {self._timeout:g} s, and are ended; load the "
            "model again"
        )
        for process in self._processes[1:]:  # worker 0 is in this process
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _outcome(self, answers: Any) -> Outcome:
        """Return what each worker has answered; raise a RuntimeError if one has ended."""
        outcome = Outcome([], [])
        for worker in range(self.session.num_workers):
            try:
                answer = answers.debug_get_from_remote(worker)
            except RuntimeError:
                number = f" (process {self._processes[worker]})" if self._processes else ""
                ended = f"worker {worker}{number} has ended; load the model again"
                self._failure = self._failure or ended
                raise RuntimeError(self._failure) from None
            if isinstance(answer, tvm_ffi.Tensor):
                outcome.values.append(answer)
                continue
            answer = json.loads(answer)
            if "error" in answer:
                outcome.errors.append((answer["error"], answer["text"]))
            outcome.values.append(answer.get("value"))
        return outcome


def _end(held: dict[str, Any], calls: threading.RLock) -> None:
    """Drop the model in all workers. They end with the last reference to their session.

    A call of another thread ends before.
    """
    with calls, deferred_interrupts():
        session = held["session"]
        held.clear()
        with contextlib.suppress(RuntimeError):  # a worker has ended before
            forget(session)
        del session  # the last reference: the processes end here
