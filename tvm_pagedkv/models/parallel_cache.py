# SPDX-License-Identifier: Apache-2.0
"""`ParallelCache`: the caches of the workers of a `ParallelModel` as one."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import tvm_ffi

from ..cache import CacheStats, KVCache
from .parallel_workers import Workers


class ParallelCache:
    """The caches of all workers as one. Its methods are those of `KVCache`, called on every worker.

    Parameters
    ----------
    workers : Workers
    cache_id : int
        Number of the cache in the workers.
    """

    def __init__(self, workers: Workers, cache_id: int):
        self.id, self._workers = cache_id, workers
        weakref.finalize(self, _drop, workers, cache_id).atexit = False

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
        if tokens is None:
            self._call("add_sequence", seq_id)
            return 0
        ids = _shape(tokens)
        length = self.match_prefix(ids, salt)
        # The last token that a worker is given is not reused.
        return self._call("add_sequence", seq_id, ids[: length + 1], salt)[0]

    def match_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Return the number of positions that `add_sequence` would reuse for these tokens."""
        ids = _shape(tokens)
        while True:
            # Workers differ in what they still have for layers with a window.
            lengths = self._call("match_prefix", ids, salt)
            if min(lengths) == max(lengths):
                return lengths[0]
            ids = ids[: min(lengths) + 1]

    def record_tokens(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Tell the tokens of positions, so that other sequences find their pages."""
        self._call("record_tokens", seq_id, _shape(tokens))

    def remove_sequence(self, seq_id: int) -> None:
        self._call("remove_sequence", seq_id)

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        self._call("fork_sequence", parent_id, child_id, fork_pos)

    def pop_n(self, seq_id: int, n: int) -> None:
        self._call("pop_n", seq_id, n)

    def enable_sliding_window(self, seq_id: int, window: int, sinks: int = 0) -> None:
        self._call("enable_sliding_window", seq_id, window, sinks)

    def clear(self) -> None:
        self._call("clear")

    def stats_of_workers(self) -> list[dict[str, Any]]:
        """Return the statistics of each worker's cache."""
        return self._call("stats")

    def _call(self, method: str, *args: int | bytes | tuple[int, ...]) -> list[Any]:
        """Call a method of every worker's cache; return the results."""
        return self._workers.call("call", self.id, method, *map(_argument, args))


def _shape(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as Python integers; raise a TypeError if they are none."""
    return tuple(map(operator.index, tokens))


def _argument(value: int | bytes | tuple[int, ...]) -> Any:
    """Return a value as one that reaches other processes."""
    if isinstance(value, tuple):
        return tvm_ffi.Shape(value)
    return value.hex() if isinstance(value, bytes) else int(value)


def _drop(workers: Workers, cache_id: int) -> None:
    if workers.close.alive:
        with contextlib.suppress(RuntimeError):  # a worker has ended, and with it its caches
            workers.call("drop_cache", cache_id)
