# SPDX-License-Identifier: Apache-2.0
"""`TieredStore`: several stores as one, the nearest first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from .._checks import check_choice
from .interface import PageStore
from .memory import check_batch, check_keys, view

_log = logging.getLogger(__name__)


class TieredStore:
    """Several stores as one: reads ask one after the other, writes go to all of them or the first.

    A value that was found is put into the stores before the one that had it. A store that raises is
    skipped: the others still answer.

    Parameters
    ----------
    stores : sequence of PageStore
        The nearest first. They belong to the tiered store, which closes them.
    put : str
        "all" writes each value to every store, "first" to the first one only.
    verify : callable, optional
        ``verify(key, value)`` returns whether a value, a memoryview, is right. A wrong value is a
        miss of its store. Without it, a wrong value of a far store would be put into the near ones.
    """

    def __init__(
        self,
        stores: Sequence[PageStore],
        *,
        put: str = "all",
        verify: Callable[[bytes, memoryview], bool] | None = None,
    ) -> None:
        if not stores:
            raise ValueError("stores must have at least one store")
        check_choice("put", put, ("all", "first"))
        self._stores = list(stores)
        self._num_put = len(self._stores) if put == "all" else 1
        self._verify = verify
        self._is_closed = False

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a store has a value."""
        check_keys(keys)
        self._check_usable()
        results = [False] * len(keys)
        for store in self._stores:
            left = [i for i, is_there in enumerate(results) if not is_there]
            if not left:
                break
            for i, is_there in zip(left, _ask(store.exists, [keys[i] for i in left]), strict=True):
                results[i] = is_there
        return results

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values from the first store that has them; return for each whether one does."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        for tier, store in enumerate(self._stores):
            left = [i for i, is_there in enumerate(results) if not is_there]
            if not left:
                break
            hits = _ask(store.get_into, *_of(left, keys, addresses, sizes))
            for i, hit in zip(left, hits, strict=True):
                value = view(addresses[i], sizes[i])
                results[i] = hit and (self._verify is None or self._verify(keys[i], value))
            found = [i for i in left if results[i]]
            for nearer in self._stores[:tier] if found else ():
                _ask(nearer.put_from, *_of(found, keys, addresses, sizes))
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values; return for each whether a store has it."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        for store in self._stores[: self._num_put]:
            for i, is_kept in enumerate(_ask(store.put_from, keys, addresses, sizes)):
                results[i] |= is_kept
        return results

    def register(self, address: int, size: int) -> None:
        """Register memory with each store."""
        for store in self._stores:
            store.register(address, size)

    def close(self) -> None:
        """Close all stores; closing again does nothing."""
        self._is_closed = True
        for store in self._stores:
            try:
                store.close()
            except Exception as error:
                _log.warning("%s cannot be closed: %s", type(store).__name__, error)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ValueError("the TieredStore is closed")


def _of(indices: list[int], *lists: Sequence[Any]) -> list[list[Any]]:
    return [[each[i] for i in indices] for each in lists]


def _ask(function: Callable[..., list[bool]], keys: Sequence[bytes], *rest: Any) -> list[bool]:
    """Return the reply of a store, or misses if it raises."""
    try:
        return function(keys, *rest)
    except Exception as error:
        _log.debug("a store of a TieredStore raised %s: %s", type(error).__name__, error)
        return [False] * len(keys)
