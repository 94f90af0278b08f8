# SPDX-License-Identifier: Apache-2.0
"""A sender that lacks first positions which a receiver asks for sends what it has."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

from tvm_pagedkv.transfer import TransferError, _runtime

from ..support.recurrent_world import World, outputs
from ..support.transfer_cases import connect, pump, state
from .test_recurrent_transfer import feed, worlds


def forked(source: World, position: int, more: int = 0) -> None:
    """Make sequence 1 a fork of a longer one, whose ingredients begin with the state before it."""
    source.cache.add_sequence(0)
    feed(source, 0, [21, 19, 48, 12])
    source.cache.fork_sequence(0, 1, position)
    if more:
        feed(source, 1, [more])


def send_all(source: World, target: World, begin: int = 0):
    sender, receiver = connect(source.cache, target.cache)
    target.cache.add_sequence(1)
    if begin:
        feed(target, 1, [begin])  # the first step of the source
    ticket = receiver.request(1, source.cache.sequence_length(1) - begin)
    sender.finish(sender.send(sender.next_request(), 1))
    pump(sender, receiver)
    return ticket


def same_next_steps(source: World, target: World, pops: int) -> None:
    """Steps after a fork, a pop, and none give the same bits in both caches."""
    for each in (source, target):
        each.cache.check_integrity()
        each.cache.fork_sequence(1, 50)
        each.cache.pop_n(1, pops)
    for salt, lengths in enumerate(({1: 1, 50: 5}, {1: 18, 50: 1})):
        ours, theirs = (outputs(each, lengths, salt) for each in (source, target))
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one, other), lengths
    for each in (source, target):
        each.cache.check_integrity()


@pytest.mark.parametrize(
    ("position", "more", "begin", "expected"),
    [
        (70, 0, 0, 64),
        (70, 5, 0, 64),
        (70, 5, 21, 64),
        (64, 0, 0, 64),
        (64, 1, 0, 64),
        (70, 10, 0, 64),  # which is what the receiver asks for
        (20, 0, 0, 16),  # the receiver asks for no state at all
        (20, 9, 0, 16),
        (16, 0, 0, 16),
        (9, 3, 0, 0),
    ],
)
def test_a_fork_is_sent_with_the_states_that_it_has(position, more, begin, expected):
    source, target = worlds()
    forked(source, position, more)
    length = position + more
    assert _runtime.first_to_send(source.cache, 1, begin, length)[-3:] == [expected] * 3
    assert send_all(source, target, begin).is_done
    table = target.cache._state_table(1, 0)
    assert (table[0], len(table[2])) == (expected, int(expected > 0))
    for each in (source, target):
        assert each.cache.stats()["num_pinned_pages"] == 0
    same_next_steps(source, target, min(length - expected, more, 3))


def test_what_the_receiver_has_begun_is_not_replaced():
    """It has states of its own, so that nothing but the ingredients behind them will do."""
    source, target = worlds()
    forked(source, 70, 4)
    sender, receiver = connect(source.cache, target.cache)
    target.cache.add_sequence(1)
    feed(target, 1, [21, 29])
    receiver.request(1, 24)
    with pytest.raises(ValueError, match="position 50 of sequence 1 is gone: recurrent layers"):
        sender.send(sender.next_request(), 1)


@pytest.mark.parametrize("position", [20, 70])
def test_a_transfer_that_is_cancelled_after_it_has_begun_leaves_nothing(position):
    source, target = worlds()
    forked(source, position)
    sender, receiver = connect(source.cache, target.cache)
    target.cache.add_sequence(1)
    before, tables = state(target.cache), [target.cache._state_table(1, s) for s in range(3)]
    ticket = receiver.request(1, position + 3)
    send = sender.send(sender.next_request(), 1)
    pump(sender, receiver)
    assert ticket.confirmed == position
    target.cache.check_integrity()
    receiver.cancel(ticket)
    with pytest.raises(TransferError):
        sender.finish(send)
    assert state(target.cache) == before
    assert [target.cache._state_table(1, s) for s in range(3)] == tables
    target.cache.check_integrity()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([64, 64], "expected a position for each of 10 groups of layers and of states, got 9"),
        ([64, 64, 63], "it cannot take the one behind 63 in its place"),
        ([64, 64, 32], "it cannot take the one behind 32 in its place"),
        ([64, 64, 80], "it cannot take the one behind 80 in its place"),
        ([64, 64, -16], "it cannot take the one behind -16 in its place"),
    ],
)
def test_a_sender_that_chooses_wrong_states_is_refused(lengths, message):
    source, target = worlds()
    forked(source, 70)
    sender, receiver = connect(source.cache, target.cache)
    target.cache.add_sequence(1)
    before = state(target.cache)
    ticket = receiver.request(1, 70)
    firsts = [0] * len(target.cache.stats()["groups"]) + lengths
    with pytest.raises(ValueError, match=message):
        _runtime.shorten_receive(target.cache, 1, ticket.receive_id, firsts)
    with pytest.raises(ValueError, match="receive 99 of sequence 1 is not under way"):
        _runtime.shorten_receive(target.cache, 1, 99, firsts)
    offer = {"type": "offer", "id": ticket.id, "block": 1, "begin": 0, "end": 70, "runs": []}
    sender.channel.send(offer | {"firsts": firsts})
    receiver.poll()
    assert ticket.error is not None
    assert state(target.cache) == before
    target.cache.check_integrity()
    for begin, end in ((-1, 3), (3, 3), (0, 2**31)):
        with pytest.raises(ValueError, match="cannot send positions"):
            tvm_ffi.get_global_func("pagedkv.first_to_send")(source.cache, 1, begin, end)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
