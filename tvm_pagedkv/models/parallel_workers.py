# SPDX-License-Identifier: Apache-2.0
"""`Workers`: the workers of a `ParallelModel`, which run commands and answer."""

from __future__ import annotations

import contextlib
import json
import weakref
from typing import Any

import tvm_ffi

from .._errors import CacheFullError
from ..distributed import deferred_interrupts, forget, reconnect

_ERRORS = {
    error.__name__: error
    for error in (ValueError, KeyError, IndexError, TypeError, MemoryError, CacheFullError)
}


class Workers:
    """A Disco session whose workers each have a `ModelWorker`.

    Once a worker process has ended, every call raises a RuntimeError that says so. The workers end
    with `close`, when nothing refers to this object, or with the process.
    """

    def __init__(self, session: Any):
        run = session.get_global_func("tvm_pagedkv.models.run_worker")
        self._held = {"session": session, "run": run}
        self._processes: list[int] = []
        self._failure = ""  # why no worker can be used any more
        self.close = weakref.finalize(self, _end, self._held)

    @property
    def session(self):
        """The session; a RuntimeError once it is closed."""
        return self._part("session")

    def load(self, options: str) -> None:
        """Let every worker load its part of the model."""
        with deferred_interrupts():
            load = self.session.get_global_func("tvm_pagedkv.models.load_worker")
            self._processes = _values(self._answers(load(options)))

    def call(self, command: str, *args: Any) -> list[Any]:
        """Run a method of `ModelWorker` on all workers; return the result of each."""
        with deferred_interrupts():
            return _values(self._answers(self._part("run")(command, *args)))

    def step(self, *args: Any) -> list[Any]:
        """Run `ModelWorker.step` on all workers. If it fails on one, no cache has changed."""
        with deferred_interrupts():
            answers = self._answers(self._part("run")("step", *args))
            try:
                return _values(answers)
            except Exception:
                self._reconnect()
                raise

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
        with deferred_interrupts():
            return self._part("run")(command, *args).debug_get_from_remote(0)

    def _part(self, name: str) -> Any:
        if not self._held:
            raise RuntimeError("the model is closed: its workers have ended")
        if self._failure:
            raise RuntimeError(self._failure)
        return self._held[name]

    def _answers(self, answers) -> list[Any]:
        """Return what each worker has answered; a RuntimeError if one has ended."""
        found = []
        for worker in range(self.session.num_workers):
            try:
                found.append(answers.debug_get_from_remote(worker))
            except RuntimeError:
                number = f" (process {self._processes[worker]})" if self._processes else ""
                self._failure = f"worker {worker}{number} has ended; load the model again"
                raise RuntimeError(self._failure) from None
        return found


def _end(held: dict[str, Any]) -> None:
    """Drop the model in all workers. They end with the last reference to their session."""
    with deferred_interrupts():
        session = held["session"]
        held.clear()
        with contextlib.suppress(RuntimeError):  # a worker has ended before
            forget(session)
        del session  # the last reference: the processes end here


def _values(answers: list[Any]) -> list[Any]:
    """Return the values in the workers' answers, or raise the error of the worker that failed."""
    values, errors = [], []
    for answer in answers:
        if isinstance(answer, tvm_ffi.Tensor):
            values.append(answer)
            continue
        answer = json.loads(answer)
        if "error" in answer:
            errors.append((answer["error"], answer["text"]))
        values.append(answer.get("value"))
    if errors:
        # A worker that lost its connection is not the one that failed.
        name, text = next((x for x in errors if x[0] != ConnectionError.__name__), errors[0])
        raise _ERRORS.get(name, RuntimeError)(text)
    return values
