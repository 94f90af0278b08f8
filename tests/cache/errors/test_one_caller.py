# SPDX-License-Identifier: Apache-2.0
"""A cache serves one thread at a time: a second one is refused, and nothing waits or breaks."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import tvm_ffi

from tvm_pagedkv.transfer import _runtime

from ...support.cases.caches.cache_cases import DIM, HEADS, PlainPair
from ...support.emulators.python_kernels import KERNELS, copy_pages, make_cache, snapshot

BUSY = "another thread is inside this cache"


def rows(count: int) -> np.ndarray:
    return np.ones((count, HEADS, DIM), "float32")


def in_thread(function) -> list:
    """Return what a function returns or raises in its own thread."""
    results = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the second caller waits"
    return results


CALLS = {
    "add": lambda c: c.add_sequence(7),
    "remove": lambda c: c.remove_sequence(0),
    "fork": lambda c: c.fork_sequence(0, 7),
    "pop": lambda c: c.pop_n(0, 1),
    "clear": lambda c: c.clear(),
    "begin": lambda c: c.begin_forward([0], [1]),
    "end": lambda c: c.end_forward(),
    "abort": lambda c: c.abort_forward(),
    "attention": lambda c: c.attention(1, rows(2), 1.0),
    "read": lambda c: c.debug_get_kv(0),
    "length": lambda c: c.sequence_length(0),
    "stats": lambda c: c.stats(),
    "integrity": lambda c: c.check_integrity(),
    "receive": lambda c: _runtime.prepare_recv(c, 0, 1),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("busy_in", ["prefill", "copy_pages"])
def test_a_second_thread_is_refused(busy_in, name):
    """While the first one runs a kernel of attention, or the copy of a shared page."""
    found = []

    def curious(*arguments):
        if not found:
            found.extend(in_thread(lambda: CALLS[name](cache)))
        (copy_pages if busy_in == "copy_pages" else KERNELS["prefill"])(*arguments)

    kernels = {"copy_pages": copy_pages, busy_in: curious}
    cache = make_cache(kernels)
    pair = PlainPair(cache)
    pair.add(0, 2)
    cache.description  # noqa: B018  cached, as it is after any tensor was given
    pair.fork(0, 1, 0)
    if busy_in == "prefill":
        pair.step([0], [2])
    else:
        pair.step([2], [3])
        pair.fork(2, 3, -1)
        pair.step([3], [2])
    (error,) = found
    assert isinstance(error, RuntimeError) and BUSY in str(error)
    pair.check_rows()
    cache.check_integrity()


def test_the_same_thread_may_enter_again():
    """Handlers and kernels look at the cache that calls them."""
    seen = []

    def curious(*arguments):
        seen.append(cache.sequence_length(0))
        KERNELS["prefill"](*arguments)

    cache = make_cache({"prefill": curious})
    pair = PlainPair(cache)
    pair.add(0)
    pair.step([0], [2])
    assert seen == [2, 2]


def test_two_threads_that_fork_and_remove():
    """Calls that once corrupted reference counts either succeed or change nothing."""
    cache = make_cache(max_num_sequences=64)
    cache.add_sequence(0)
    with cache.forward([0], [9]):
        for layer in range(2):
            cache.attention(layer, rows(9))
    before = snapshot(cache, [0])
    refused = [0, 0]

    def call(worker: int, function, *arguments) -> None:
        while True:
            try:
                return function(*arguments)
            except RuntimeError as error:
                assert BUSY in str(error)
                refused[worker] += 1

    def work(worker: int) -> None:
        try:
            for i in range(3000):
                own = 1 + worker * 8 + i % 8
                call(worker, cache.fork_sequence, 0, own, 1 + i % 9)
                call(worker, cache.remove_sequence, own)
        except Exception as error:
            failures.append(error)

    failures: list = []
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.check_integrity()
    assert snapshot(cache, [0]) == before


def test_caches_of_several_threads_are_independent():
    failures: list = []

    def work(seed: int) -> None:
        try:
            pair = PlainPair(make_cache(rope_mode=1), "normal", seed=seed)
            pair.add(0, 1)
            for step in range(12):
                pair.step([0, 1], [1 + step % 3, 2])
                if step % 4 == 1:
                    pair.fork(0, 10 + step, 2)
            pair.check_rows()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- finalizers ---------------------------------------------------------------------------------


def sending(kernels=None):
    """A cache with rows that a receiver has been offered, and the ids of the blocks."""
    cache, offered = make_cache(kernels or {"copy_pages": copy_pages}), []
    cache.add_sequence(0)
    with cache.forward([0], [5]):
        for layer in range(2):
            cache.attention(layer, rows(5))
    _runtime.set_send_handler(cache, 1, offered.append, [64])
    _runtime.mark_send(cache, 0, 0, [1, 0, 9], 1)
    assert len(offered) == 1 and cache.stats()["num_send_blocks"] == 1
    return cache, offered


@pytest.mark.parametrize("where", ["copy_pages", "prefill", "other_thread"])
def test_a_handler_is_dropped_at_the_next_call(where):
    """Also when garbage is collected in the middle of planning, or by another thread."""
    collected = []

    def collecting(*arguments):
        nonlocal armed
        if armed:
            armed = False
            drop = lambda: _runtime.set_send_handler(cache, 1, None)  # noqa: E731
            collected.extend(in_thread(drop) if where == "other_thread" else [drop()])
            assert stats_within() == 1  # not yet: the cache is busy
        (KERNELS["prefill"] if where == "prefill" else copy_pages)(*arguments)

    def stats_within() -> int:
        return cache.stats()["num_send_blocks"]

    armed = False  # whether the next kernel finds garbage
    name = "prefill" if where == "prefill" else "copy_pages"
    cache, _ = sending({"copy_pages": copy_pages, name: collecting})
    cache.fork_sequence(0, 1)
    armed = True
    with cache.forward([1], [2]):
        armed = where == "prefill"
        for layer in range(2):
            cache.attention(layer, rows(2))
    assert set(collected) == {None}
    assert cache.stats()["num_send_blocks"] == 0 and cache.stats()["num_pinned_pages"] == 0
    _runtime.set_send_handler(cache, 1, print, [64])  # the receiver's place is free
    cache.check_integrity()


def test_a_handler_that_is_collected_may_call_the_cache():
    """To drop the handler drops what it holds, which may have finalizers of its own."""
    cache, _ = sending()

    class Nosy:
        def __call__(self, block):
            pass

        def __del__(self):
            lengths.append(cache.sequence_length(0))
            _runtime.set_send_handler(cache, 5, None)

    lengths: list = []
    _runtime.set_send_handler(cache, 2, Nosy(), [64])
    _runtime.set_send_handler(cache, 2, None)
    gc.collect()
    assert lengths == [5]


# --- handlers that fail -------------------------------------------------------------------------


def test_a_failing_handler_starves_nobody():
    cache = make_cache()
    offered = []

    def failing(block: int) -> None:
        raise ValueError(f"block {block}")

    for seq_id in range(3):
        cache.add_sequence(seq_id)
        _runtime.set_send_handler(cache, seq_id, failing if seq_id == 1 else offered.append, [64])
        _runtime.mark_send(cache, seq_id, 0, [1, 0, 9], seq_id)
    with pytest.raises(ValueError, match="block"):
        with cache.forward([0, 1, 2], [2, 2, 2]):
            for layer in range(2):
                cache.attention(layer, rows(6))
    assert not cache.is_in_forward and cache.sequence_length(1) == 2  # the step has ended
    assert [_runtime.send_block(cache, block)["sequence_id"] for block in offered] == [0, 2]
    _runtime.set_send_handler(cache, 1, None)
    for block in offered:
        _runtime.release_send_block(cache, block)
    assert cache.stats()["num_pinned_pages"] == 0
    cache.check_integrity()


def test_a_failed_mark_send_leaves_nothing():
    cache, offered = sending()
    _runtime.release_send_block(cache, offered[0])
    _runtime.cancel_send(cache, 0, _runtime.send_id(cache, 0))

    def failing(block: int) -> None:
        raise ValueError("no luck")

    _runtime.set_send_handler(cache, 2, failing, [64])
    before = snapshot(cache, [0])
    with pytest.raises(ValueError, match="no luck"):
        _runtime.mark_send(cache, 0, 0, [1, 0, 9], 2)
    assert snapshot(cache, [0]) == before and _runtime.send_id(cache, 0) == 0
    _runtime.mark_send(cache, 0, 0, [1, 0, 9], 1)
    assert len(offered) == 2


# --- receives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_with", ["cancel", "release"])
@pytest.mark.parametrize("how", ["remove", "pop", "step", "clear"])
def test_pages_of_a_receive_stay_taken(how, ends_with):
    """A transport may write to them until it says that it is done, whoever uses the sequence."""
    cache = make_cache(max_total_tokens=64)
    cache.add_sequence(0)
    numbers = _runtime.prepare_recv(cache, 0, 10)
    assert len(numbers) == 3  # one run of slots
    receive = _runtime.receive_id(cache, 0)
    pages = set(cache.page_table(0))
    if how == "remove":
        cache.remove_sequence(0)
    elif how == "clear":
        cache.clear()
    elif how == "pop":
        cache.pop_n(0, 10)
    else:
        with cache.forward([0], [1]):
            for layer in range(2):
                cache.attention(layer, rows(1))
        cache.remove_sequence(0)
    assert cache.stats()["num_used_pages"] == len(pages) == 3
    cache.check_integrity()
    cache.add_sequence(9)  # and they are given to nobody
    with cache.forward([9], [32]):
        for layer in range(2):
            cache.attention(layer, rows(32))
    assert not pages & set(cache.page_table(9))
    if ends_with == "cancel":
        _runtime.cancel_receive(cache, 0, receive)
    else:
        _runtime.release_receives(cache, {receive})
    assert cache.stats()["num_used_pages"] == 8 and cache.stats()["num_pinned_pages"] == 0
    cache.check_integrity()


def test_engines_that_name_no_receive_leak_nothing():
    """The stock functions have no word for the end of a receive: removal frees the pages."""
    cache = make_cache()
    cache.add_sequence(0)
    tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")(cache, 0, 10)
    cache.remove_sequence(0)
    assert cache.stats()["num_used_pages"] == 0
    cache.check_integrity()


def test_a_receive_that_is_finished_frees_nothing_and_pins_nothing():
    cache = make_cache()
    cache.add_sequence(0)
    _runtime.prepare_recv(cache, 0, 10)
    receive = _runtime.receive_id(cache, 0)
    _runtime.finish_receive(cache, 0, receive)
    assert cache.stats()["num_pinned_pages"] == 0 and cache.stats()["num_used_pages"] == 3
    copies = cache.stats()["cow_page_copies"]
    with cache.forward([0], [1]):
        for layer in range(2):
            cache.attention(layer, rows(1))
    assert cache.stats()["cow_page_copies"] == copies


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
