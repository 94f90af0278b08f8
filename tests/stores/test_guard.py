# SPDX-License-Identifier: Apache-2.0
"""`GuardedStore`: stores that hang, raise or answer nonsense, with a clock of the test."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tvm_pagedkv.stores import GuardedStore

from ..support.cases.caches.store_cases import Values, get, key_of, put, value_of
from ..support.emulators.store_memory import MemoryStore
from ..support.harness.in_child import failures

SIZES = [5000, 70_000, 100, 4096]
KEYS = [key_of(i) for i in range(len(SIZES))]
PAUSE = 10.0


class Clock:
    """Seconds that the test sets."""

    now = 1e9

    def __call__(self):
        return self.now


class Moody(MemoryStore):
    """A store that raises, hangs or answers nonsense when it is told to."""

    def __init__(self):
        super().__init__()
        self.mood = "good"
        self.calls = 0
        self.entered, self.released = threading.Event(), threading.Event()

    def _act(self, function, *arguments):
        self.calls += 1
        if self.mood == "hang":
            self.entered.set()
            assert self.released.wait(60)
        elif self.mood == "raise":
            raise OSError("the wire is cut")
        elif self.mood == "nonsense":
            return [True]
        return function(*arguments)

    def exists(self, keys):
        return self._act(super().exists, keys)

    def get_into(self, keys, addresses, sizes):
        return self._act(super().get_into, keys, addresses, sizes)

    def put_from(self, keys, addresses, sizes):
        return self._act(super().put_from, keys, addresses, sizes)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def moody():
    store = Moody()
    yield store
    store.released.set()


@pytest.fixture
def guard(moody, clock):
    guarded = GuardedStore(moody, deadline=30, failures=3, pause=PAUSE, clock=clock)
    yield guarded
    moody.released.set()
    guarded.close()


@pytest.mark.parametrize("mood", ["raise", "nonsense"])
def test_the_guard_opens_and_closes(guard, moody, clock, caplog, mood):
    assert all(put(guard, KEYS, SIZES))
    moody.mood = mood
    for i in range(3):
        assert not guard.is_open
        assert not any((put if i % 2 else get)(guard, KEYS, SIZES))
    assert guard.is_open
    calls = moody.calls
    clock.now += PAUSE - 0.001
    assert not any(guard.exists(KEYS) + get(guard, KEYS, SIZES) + put(guard, KEYS, SIZES))
    assert moody.calls == calls
    clock.now += 0.001  # one try, which fails
    assert not any(guard.exists(KEYS))
    assert not any(guard.exists(KEYS))
    assert moody.calls == calls + 1
    moody.mood = "good"
    assert not any(get(guard, KEYS, SIZES))
    clock.now += PAUSE
    assert all(get(guard, KEYS, SIZES)) and all(guard.exists(KEYS))
    assert not guard.is_open
    assert guard.stats() == {
        "calls": 8,  # with the one that registers memory
        "failures": 4,
        "timeouts": 0,
        "refused": 5,
        "opened": 1,
    }
    reason = "OSError: the wire is cut" if mood == "raise" else "a reply that is not a list of 4"
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"Moody is unavailable; retrying every 10 s: {reason}")
    assert last == "Moody works again"


def test_single_failures_do_not_open(guard, moody, caplog):
    put(guard, KEYS, SIZES)
    for _ in range(5):
        moody.mood = "raise"
        assert not any(get(guard, KEYS, SIZES)) and not any(get(guard, KEYS, SIZES))
        moody.mood = "good"
        assert all(get(guard, KEYS, SIZES))
    assert not caplog.records


def test_a_call_that_hangs_leaves_the_callers_memory_alone(moody):
    guard = GuardedStore(moody, deadline=0.05, failures=1000)
    for i, key in enumerate(KEYS):
        moody.values[key] = value_of(key, SIZES[i]).tobytes()
    moody.mood = "hang"
    memory = Values(SIZES)
    before = memory.memory.copy()
    assert guard.get_into(KEYS, memory.addresses, SIZES) == [False] * 4
    assert moody.entered.is_set()
    calls = moody.calls
    # Neither a call nor the use of the guard's buffer until it returns.
    assert not any(put(guard, KEYS, SIZES) + get(guard, KEYS, SIZES) + guard.exists(KEYS))
    assert moody.calls == calls
    moody.mood = "good"
    moody.released.set()
    assert guard._late.done.wait(60)
    assert (memory.memory == before).all()
    assert all(get(guard, KEYS, SIZES))
    assert guard.stats()["timeouts"] == 1 and guard.stats()["refused"] == 3
    guard.close()


def test_a_put_that_hangs_writes_what_it_was_given(moody):
    guard = GuardedStore(moody, deadline=0.05, failures=1000)
    moody.mood = "hang"
    assert put(guard, KEYS, SIZES) == [False] * 4  # and the values' memory is gone
    moody.mood = "good"
    moody.released.set()
    assert guard._late.done.wait(60)
    assert all(get(guard, KEYS, SIZES))
    guard.close()


def test_a_store_that_hangs_cannot_hold_up_close(moody):
    guard = GuardedStore(moody, deadline=0.05)
    moody.mood = "hang"
    assert guard.exists(KEYS) == [False] * 4
    guard.close()
    guard.close()
    assert not moody.is_closed
    moody.released.set()
    assert moody.closed.wait(60)


def test_batches_larger_than_the_buffer(moody):
    guard = GuardedStore(moody, deadline=60, buffer_bytes=128 << 10)
    sizes = [40_000] * 10 + [128 << 10, (128 << 10) + 1]
    keys = [key_of(i) for i in range(len(sizes))]
    expected = [True] * 11 + [False]
    assert put(guard, keys, sizes) == guard.exists(keys) == get(guard, keys, sizes) == expected
    assert get(guard, keys, sizes, shift=3) == expected
    guard.close()


def test_memory_is_registered(guard, moody):
    assert moody.registered == [(guard._address, 64 << 20)]
    guard.register(4096, 100)
    assert len(moody.registered) == 1


def test_a_store_that_refuses_registration_counts_as_failing():
    class Refusing(MemoryStore):
        def register(self, address, size):
            raise OSError("no device")

    guard = GuardedStore(Refusing(), failures=1)
    assert guard.is_open and guard.exists(KEYS) == [False] * 4


def test_wrong_arguments_are_no_failures(guard):
    for _ in range(5):
        with pytest.raises(ValueError, match="32 bytes"):
            guard.exists([b"x"])
    assert guard.stats()["failures"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deadline": 0}, "deadline must be positive"),
        ({"failures": 0}, "failures must be between 1"),
        ({"pause": float("nan")}, "pause must be positive"),
        ({"buffer_bytes": 10}, "buffer_bytes must be between 4096"),
    ],
)
def test_limits_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        GuardedStore(MemoryStore(), **arguments)


def test_a_guard_that_is_dropped_ends_its_thread():
    store = MemoryStore()
    before = set(threading.enumerate())
    guard = GuardedStore(store)
    (thread,) = set(threading.enumerate()) - before
    reference = weakref.ref(guard)
    del guard
    gc.collect()
    assert reference() is None
    thread.join(60)
    assert not thread.is_alive()


def test_a_forked_child_is_refused(guard):
    def refused():
        with pytest.raises(RuntimeError, match="cannot be used after a fork"):
            guard.exists(KEYS)

    assert not failures([("refused", refused)], seconds=30)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
