# SPDX-License-Identifier: Apache-2.0
"""`CircuitBreaker`, which guards of stores and the worker of a cache share, on a clock of ours."""

from __future__ import annotations

from tvm_pagedkv.stores.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pause_after(breaker: CircuitBreaker, clock: Clock) -> float:
    """Seconds until the breaker lets a call through."""
    begin = clock.now
    while not breaker.may_call:
        clock.now += 0.5
    return clock.now - begin


def test_it_opens_after_failures_in_a_row():
    breaker = CircuitBreaker(3, 2.0, 2.0, Clock())
    assert [breaker.fail(), breaker.fail()] == [False, False]
    assert not breaker.succeed()  # it was not open
    assert [breaker.fail(), breaker.fail()] == [False, False]
    assert breaker.may_call and not breaker.is_open
    assert breaker.fail()
    assert breaker.is_open and not breaker.may_call


def test_one_call_is_made_after_each_pause():
    clock = Clock()
    breaker = CircuitBreaker(1, 2.0, 2.0, clock)
    assert breaker.fail()
    for _ in range(3):
        assert pause_after(breaker, clock) == 2.0
        assert breaker.is_open
        assert not breaker.fail()  # it was open already
    assert breaker.succeed() and breaker.may_call and not breaker.is_open


def test_pauses_double_up_to_the_longest():
    clock = Clock()
    breaker = CircuitBreaker(2, 1.0, 6.0, clock)
    breaker.fail()
    pauses = []
    for _ in range(5):
        breaker.fail()
        pauses.append(pause_after(breaker, clock))
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0]
    for _ in range(2000):  # no overflow
        breaker.fail()
    assert pause_after(breaker, clock) == 6.0
    breaker.succeed()
    breaker.fail()
    breaker.fail()
    assert pause_after(breaker, clock) == 1.0


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
