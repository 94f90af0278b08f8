# SPDX-License-Identifier: Apache-2.0
"""A sender that lacks first positions which a receiver asks for sends what it has."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

from tvm_pagedkv.transfer import TransferError, _runtime

from .. import reference
from ..support.cases.caches.cache_cases import layer_of
from ..support.cases.caches.transfer_cases import append, attend, caches, connect, pump, rows, state
from ..support.emulators.python_kernels import poison
from ..support.worlds.recurrent_world import World, outputs
from .test_recurrent_transfer import feed, worlds

FIRST_STEPS = [21, 19, 48, 12]


def forked(source: World, position: int, more: int = 0) -> None:
    """Make sequence 1 a fork of a longer one, whose ingredients begin with the state before it."""
    source.cache.add_sequence(0)
    feed(source, 0, FIRST_STEPS)
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


@pytest.mark.parametrize(
    ("begin", "more", "expected"), [(50, 4, 64), (57, 0, 64), (63, 8, 64), (64, 4, 0), (67, 4, 0)]
)
def test_the_receiver_has_begun(begin, more, expected):
    """It has states of its own, of which a later one takes the place where the sender has no
    ingredients behind them, nor what a window of 6 or a convolution kept for pops."""
    source, target = worlds()
    forked(source, 70, more)
    assert _runtime.first_to_send(source.cache, 1, begin, 70 + more)[-3:] == [expected] * 3
    sender, receiver = connect(source.cache, target.cache)
    target.cache.add_sequence(1)
    feed(target, 1, FIRST_STEPS)
    target.cache.fork_sequence(1, 2, begin)  # shares its pages
    target.cache.remove_sequence(1)
    target.cache.fork_sequence(2, 1)
    before, tables = state(target.cache), [target.cache._state_table(1, s) for s in range(3)]
    for is_kept in (False, True):
        ticket = receiver.request(1, 70 + more - begin)
        send = sender.send(sender.next_request(), 1)
        pump(sender, receiver)
        target.cache.check_integrity()
        if not is_kept:
            receiver.cancel(ticket)
            pump(sender, receiver)
            assert state(target.cache) == before
            assert [target.cache._state_table(1, s) for s in range(3)] == tables
            continue
        sender.finish(send)
        pump(sender, receiver)
    assert ticket.is_done
    for each in (source, target):
        assert each.cache.stats()["num_pinned_pages"] == 0
    same_next_steps(source, target, min(more, 3))


@pytest.mark.parametrize("window", [9, -8], ids=["sliding", "chunked"])
@pytest.mark.parametrize("begin", [0, 8, 9, 12, 15, 17, 23, 24, 29, 31, 32, 34])
def test_a_window_begins_behind_what_the_receiver_has(window, begin):
    """The sender is a fork, with what the next row sees; the receiver has computed a part."""
    layers = [layer_of(window), layer_of(0)]
    source, target = caches(0, layers=layers, max_total_tokens=256, prefill_chunk_size=80)
    qkv = rows(1, 80)
    source.add_sequence(0)
    append(source, 0, qkv)
    source.fork_sequence(0, 1, 35)
    target.add_sequence(2)
    if begin:
        append(target, 2, qkv[:begin])
    target.fork_sequence(2, 1)
    before = state(target)
    sender, receiver = connect(source, target)
    for is_kept in (False, True):
        ticket = receiver.request(1, 35 - begin)
        send = sender.send(sender.next_request(), 1)
        pump(sender, receiver)
        target.check_integrity()
        if is_kept:
            sender.finish(send)
            pump(sender, receiver)
        else:
            receiver.cancel(ticket)
            pump(sender, receiver)
            assert state(target) == before
    assert ticket.is_done
    target.check_integrity()
    poison(target)
    for seq_id, length in ((1, 35), (2, begin)):
        text = np.concatenate([qkv[:length], qkv[70:75]])
        outs = append(target, seq_id, text[length:])
        reference.assert_close(outs[0], attend(text, 5, window), "float32")
        reference.assert_close(outs[1], attend(text, 5), "float32")
    target.check_integrity()


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
