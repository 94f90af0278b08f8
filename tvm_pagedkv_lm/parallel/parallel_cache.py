# SPDX-License-Identifier: Apache-2.0
"""`ParallelCache`: the caches of the workers of a `ParallelModel` as one."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import tvm_ffi

from tvm_pagedkv.cache import CacheStats, KVCache

from .parallel_workers import Outcome, Workers


class ParallelCache:
    """The caches of all workers as one. Its methods are those of `KVCache`, called on every worker.

    A call that raises changes no worker's cache. What one worker alone cannot do, because its
    layers have a window and have given up pages for example, none does. Should a worker fail where
    that cannot be known before, for lack of memory, the caches may differ: every call raises a
    RuntimeError then, until `clear`.

    Parameters
    ----------
    workers : Workers
    cache_id : int
        Number of the cache in the workers.
    """

    def __init__(self, workers: Workers, cache_id: int):
        self.id, self._workers = cache_id, workers
        self._difference = ""  # why the caches of the workers may differ
        weakref.finalize(self, _drop, workers, cache_id).atexit = False

    @classmethod
    def create(cls, workers: Workers, *sizes_and_choice: int) -> ParallelCache:
        """Make a cache of every worker, or of none; see `ModelWorker.create_cache`."""
        outcome = workers.try_call("create_cache", *sizes_and_choice)
        if outcome.is_partial:
            workers.drop_cache(next(number for number in outcome.values if number is not None))
        return cls(workers, outcome.result()[0])

    def belongs_to(self, workers: Workers) -> bool:
        """Return whether the caches are those of these workers."""
        return self._workers is workers

    @property
    def first(self) -> KVCache:
        """The cache of worker 0, which is in this process, for inspection."""
        return self._workers.call_first("cache", self.id)

    def stats(self) -> CacheStats:
        """Return the statistics of worker 0's cache."""
        return self.first.stats()

    def sequence_ids(self) -> list[int]:
        """Return the ids of all sequences."""
        return self.first.sequence_ids()

    def add_sequence(
        self, seq_id: int, tokens: Sequence[int] | None = None, salt: bytes = b""
    ) -> int:
        """Add a sequence; see `KVCache.add_sequence`.

        With `tokens`, it gets the positions that the caches of all workers still have.
        """
        undo = ("remove_sequence", seq_id)
        if tokens is None:
            self._call("add_sequence", seq_id, undo=undo)
            return 0
        ids = _shape(tokens)
        while True:
            lengths = self._call("add_sequence", seq_id, ids, salt, undo=undo)
            if min(lengths) == max(lengths):
                return lengths[0]
            # Workers differ in what they still have for layers with a window. The last token that
            # a worker is given is not reused.
            ids = ids[: min(lengths) + 1]
            self._call("remove_sequence", seq_id)

    def match_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Return the number of positions that `add_sequence` would reuse for these tokens."""
        ids = _shape(tokens)
        while True:
            lengths = self._try("match_prefix", ids, salt).result()
            if min(lengths) == max(lengths):
                return lengths[0]
            ids = ids[: min(lengths) + 1]

    def record_tokens(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Tell the tokens of positions, so that other sequences find their pages."""
        self._call("record_tokens", seq_id, _shape(tokens))

    def remove_sequence(self, seq_id: int) -> None:
        self._call("remove_sequence", seq_id)

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        undo = ("remove_sequence", child_id)
        self._call("fork_sequence", parent_id, child_id, fork_pos, undo=undo)

    def pop_n(self, seq_id: int, n: int) -> None:
        self.require_agreement()
        self._try("check_pop", seq_id, n).result()  # nothing brings popped positions back
        self._call("pop_n", seq_id, n)

    def enable_sliding_window(self, seq_id: int, window: int, sinks: int = 0) -> None:
        self._call("enable_sliding_window", seq_id, window, sinks)

    def clear(self) -> None:
        self._difference = ""
        self._call("clear")

    def stats_of_workers(self) -> list[dict[str, Any]]:
        """Return the statistics of each worker's cache."""
        return self._workers.call("call", self.id, "stats")

    def step(self, name: str, *shapes: tvm_ffi.Shape) -> list[Any]:
        """Run `ModelWorker.step` on all workers; return the results."""
        self.require_agreement()
        return self._result(self._workers.step(self.id, name, *shapes), "a step")

    def require_agreement(self) -> None:
        """Raise a RuntimeError if the caches of the workers may differ."""
        if self._difference:
            raise RuntimeError(self._difference)

    def _call(self, method: str, *args: int | bytes | tuple[int, ...], undo: tuple = ()) -> list:
        """Call a method of every worker's cache; return the results.

        Parameters
        ----------
        method : str
        args
        undo : tuple, optional
            The method and arguments that take this call back where it has succeeded, if it fails
            elsewhere. Where it has failed, there is nothing that they would change.
        """
        self.require_agreement()
        outcome = self._try(method, *args)
        is_undone = outcome.is_partial and bool(undo)
        if is_undone:
            is_undone = len(self._try(*undo).errors) <= len(outcome.errors)
        return self._result(outcome, method, is_undone)

    def _result(self, outcome: Outcome, what: str, is_undone: bool = False) -> list[Any]:
        """Return the results, or raise the error; note whether the caches may differ now."""
        if outcome.is_partial and not is_undone:
            self._difference = (
                f"the caches of the workers may differ: {what} has failed on some of them; clear "
                "the cache, or make another one"
            )
        return outcome.result()

    def _try(self, method: str, *args: int | bytes | tuple[int, ...]) -> Outcome:
        return self._workers.try_call("call", self.id, method, *map(_argument, args))


def _shape(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as Python integers; raise a TypeError if they are none."""
    return tuple(map(operator.index, tokens))


def _argument(value: int | bytes | tuple[int, ...]) -> Any:
    """Return a value as one that reaches other processes."""
    if isinstance(value, tuple):
        return tvm_ffi.Shape(value)
    return value.hex() if isinstance(value, bytes) else operator.index(value)


def _drop(workers: Workers, cache_id: int) -> None:
    if workers.close.alive:
        workers.drop_cache(cache_id)
