# SPDX-License-Identifier: Apache-2.0
"""A thread that moves pages between the host memory of a cache and a store.

The thread holds the tier and the store, never the cache. When the cache dies, the tier is closed:
the thread writes what is pending, closes the store and ends. When the interpreter exits, threads
get a few seconds for that.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import tvm_ffi

from .._functions import global_function
from .breaker import CircuitBreaker
from .interface import PageStore

logger = logging.getLogger("tvm_pagedkv.stores")

_POLL_SECONDS = 60.0  # closing the tier wakes the thread at once
_EXIT_SECONDS = 5.0
_MAX_FAILURES = 3
_MIN_PAUSE, _MAX_PAUSE = 1.0, 60.0
_workers: dict[int, StoreWorker] = {}  # those that run, by the address of their memory


@tvm_ffi.register_object("pagedkv.HostMemory")
class HostMemory(tvm_ffi.Object):
    """The host memory below the pages of a cache, as the runtime's functions take it."""


class StoreWorker:
    """Serves the jobs of a tier until the tier is closed.

    Parameters
    ----------
    tier : HostMemory
        Of the function ``pagedkv.prefix_open``.
    store : PageStore
        Closed when the worker ends.
    """

    def __init__(
        self, tier: HostMemory, store: PageStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier = tier
        self._store = store
        self._breaker = CircuitBreaker(_MAX_FAILURES, _MIN_PAUSE, _MAX_PAUSE, clock)
        # Not Thread.join: before Python 3.13, a thread counts as ended once Ctrl-C ends a join.
        self._ended = threading.Event()
        _workers[_address_of(tier)] = self
        threading.Thread(target=self._run, name="tvm_pagedkv store", daemon=True).start()

    def close(self, timeout: float) -> bool:
        """Write what is pending and end; return whether it has ended within `timeout` seconds."""
        end = time.monotonic() + timeout
        global_function("pagedkv.tier_close")(self._tier)
        return self._ended.wait(max(end - time.monotonic(), 0.0))

    def _run(self) -> None:
        try:
            _serve(self._tier, self._store, self._breaker)
        finally:
            _workers.pop(_address_of(self._tier), None)
            self._ended.set()


def close_worker(tier: HostMemory, timeout: float) -> bool:
    """Close a tier and the worker that serves it; return whether they have ended in time."""
    worker = _workers.get(_address_of(tier))
    if worker is not None:
        return worker.close(timeout)
    global_function("pagedkv.tier_close")(tier)
    return True


def _address_of(tier: HostMemory) -> int:
    return int(global_function("pagedkv.tier_memory")(tier)[0])


def _serve(tier: HostMemory, store: PageStore, breaker: CircuitBreaker) -> None:
    """Loop over the jobs of a tier."""
    next_job = global_function("pagedkv.tier_next_job")
    finish_job = global_function("pagedkv.tier_finish_job")
    try:
        address, size = global_function("pagedkv.tier_memory")(tier)
        store.register(int(address), int(size))
    except Exception as error:
        logger.warning("the store cannot register the memory of the cache: %r", error)
    try:
        while True:
            job = next_job(tier, _POLL_SECONDS)
            kind = str(job["kind"])
            if kind == "closed":
                return
            if kind == "none":
                continue
            keys = [bytes(key) for key in job["keys"]]
            results = _call(store, breaker, kind, keys, job)
            yes = 2 if getattr(store, "verifies_values", False) else 1
            for line in finish_job(tier, job["id"], bytes(yes * result for result in results)):
                logger.warning("%s; they count as missing", line)
    finally:
        try:
            store.close()
        except Exception as error:
            logger.warning("the store cannot be closed: %r", error)


def _call(
    store: PageStore, breaker: CircuitBreaker, kind: str, keys: Sequence[bytes], job: tvm_ffi.Map
) -> list[bool]:
    """Do a job; what fails is a miss."""
    missing = [False] * len(keys)
    if not breaker.may_call:
        return missing
    try:
        if kind == "exists":
            results = store.exists(keys)
        else:
            addresses, sizes = [int(a) for a in job["addresses"]], [int(s) for s in job["sizes"]]
            method = store.get_into if kind == "get" else store.put_from
            results = method(keys, addresses, sizes)
        results = [bool(result) for result in results]
        if len(results) != len(keys):
            raise ValueError(f"{kind} of {len(keys)} keys returned {len(results)} results")
    except Exception as error:
        breaker.fail()
        logger.warning("the store failed (%s of %d values): %r", kind, len(keys), error)
        return missing
    breaker.succeed()
    return results


os.register_at_fork(after_in_child=_workers.clear)  # their threads are not in the child


@atexit.register
def _close_workers() -> None:
    """End the threads while the interpreter still works."""
    end = time.monotonic() + _EXIT_SECONDS
    for worker in list(_workers.values()):
        if not worker.close(max(end - time.monotonic(), 0.0)):
            logger.warning("a store has not taken all pages before the process ended")
