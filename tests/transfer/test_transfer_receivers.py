# SPDX-License-Identifier: Apache-2.0
"""Senders of one cache: a receiver that breaks is no other's error; neither is one forgotten."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest

from tvm_pagedkv.transfer import (
    ChannelClosed,
    Receiver,
    Sender,
    TransferError,
    _runtime,
    local_channels,
)

from ..support.cases.caches.transfer_cases import (
    HEADS,
    KV_HEADS,
    TransferPair,
    append,
    caches,
    pump,
    rows,
)
from ..support.emulators.python_kernels import make_cache


@pytest.fixture
def pair() -> TransferPair:
    return TransferPair()


class TwoReceivers:
    """A source with two receivers; the first of them is going to break."""

    def __init__(self, timeout=5.0):
        self.source, *self.targets = caches(0) + (make_cache(),)
        self.qkv = rows(0, 20)
        self.senders, self.receivers, self.tickets, self.sends = [], [], [], []
        for peer, target in enumerate(self.targets):
            one, other = local_channels()
            self.senders.append(Sender(self.source, one, peer, timeout))
            self.receivers.append(Receiver(target, other, timeout))
            self.source.add_sequence(peer)
            target.add_sequence(0)
            self.tickets.append(self.receivers[-1].request(0, 9))
            request = self.senders[-1].next_request()
            self.sends.append(self.senders[-1].send(request, peer))

    def step(self):
        """Compute all rows of both sequences, in one step."""
        with self.source.forward([0, 1], [9, 9]):
            for layer in range(2):
                self.source.attention(layer, np.concatenate([self.qkv[:9]] * 2))

    def check_second(self):
        """The second receiver gets everything, and nothing is left of the first."""
        self.senders[1].finish(self.sends[1], "all")
        pump(self.senders[1], self.receivers[1])
        assert self.receivers[1].wait(self.tickets[1], 0.0) == "all"
        k = self.targets[1].debug_get_kv(0)[0].numpy()
        np.testing.assert_array_equal(k[0], self.qkv[:9, HEADS : HEADS + KV_HEADS])

    def check_nothing_is_held(self):
        assert self.source.stats()["num_pinned_pages"] == 0
        assert self.source.stats()["num_send_blocks"] == 0
        self.source.check_integrity()


@pytest.mark.parametrize("error", [OSError(28, "no space"), TypeError("x"), ChannelClosed("gone")])
def test_a_channel_that_breaks_while_a_step_offers(error):
    """Neither the step fails nor the other receiver, which is told after the first."""
    two = TwoReceivers()

    def fail(message):
        raise error

    two.senders[0].channel.send = fail
    two.step()
    two.check_second()
    with pytest.raises(TransferError):
        two.senders[0].finish(two.sends[0])
    two.check_nothing_is_held()


def test_an_offer_that_cannot_be_described(monkeypatch):
    two = TwoReceivers()
    describe = _runtime.send_block
    calls = []

    def fail_at_first(cache, block):
        calls.append(block)
        if len(calls) == 1:
            raise MemoryError("no memory")
        return describe(cache, block)

    monkeypatch.setattr(_runtime, "send_block", fail_at_first)
    two.step()
    two.check_second()
    with pytest.raises(TransferError, match="cannot offer block .*no memory"):
        two.senders[0].poll()
    two.check_nothing_is_held()


def test_a_receiver_that_claims_to_have_read(fake_clock):
    """The thread that serves both does not wait for the proof."""
    two = TwoReceivers(timeout=3.0)
    time_limits = []
    two.senders[0].channel.was_read = lambda tag, timeout: bool(time_limits.append(timeout))
    two.step()
    two.receivers[0].poll()
    two.senders[0].poll()
    two.check_second()
    assert time_limits and set(time_limits) == {0.0}
    assert fake_clock.time == 0.0
    two.senders[0].finish(two.sends[0])
    with pytest.raises(TransferError, match="no read notification for block .* within"):
        two.senders[0].wait(two.sends[0])
    with pytest.raises(TransferError, match="no read notification for block .* within"):
        two.receivers[0].wait(two.tickets[0])
    two.check_nothing_is_held()


def test_a_receiver_that_never_stops_talking():
    two = TwoReceivers()
    channel = two.senders[0].channel
    channel.receive = lambda timeout: {"type": "failed", "id": 99, "reason": "again"}
    assert two.senders[0].poll()  # it returns
    two.step()
    two.check_second()


def test_a_refusal_lets_go_of_what_was_offered(pair):
    request = pair.begin()
    send = pair.sender.send(request, 0)
    append(pair.source, 0, pair.qkv[6:10])
    assert pair.source.stats()["num_send_blocks"] == 1
    pair.sender.refuse(request, "too busy")
    with pytest.raises(TransferError, match="too busy"):
        pair.receiver.wait(pair.ticket)
    with pytest.raises(TransferError, match="was refused: too busy"):
        pair.sender.finish(send)
    pair.check()


# --- senders that are forgotten -----------------------------------------------------------------


def test_a_forgotten_sender(pair, monkeypatch):
    """The garbage collector may run anywhere: it raises nothing and waits for no lock."""
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:10])
    channel = pair.sender.channel
    hooks = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: hooks.append(error))
    monkeypatch.setattr(sys, "unraisablehook", hooks.append)
    locked, done, held_until_done = threading.Event(), threading.Event(), []

    def hold():
        with channel._outbox.changed, channel._inbox.changed:
            locked.set()
            held_until_done.append(done.wait(60.0))

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60.0)
    del send, pair.sender
    gc.collect()
    done.set()
    thread.join()
    assert held_until_done == [True]  # the collector did not wait for the locks
    assert hooks == []
    assert pair.source.stats()["num_send_blocks"] == 0
    append(pair.source, 0, pair.qkv[10:12])
    pair.source.check_integrity()


def test_a_sender_forgotten_while_the_cache_is_busy(pair, monkeypatch):
    """Whatever the cache says to it then, no error comes out of the garbage collector."""
    hooks = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: hooks.append(error))
    monkeypatch.setattr(sys, "unraisablehook", hooks.append)

    def busy(name):
        raise ValueError("not possible while the cache changes its pages")

    monkeypatch.setattr(_runtime, "global_function", busy)
    del pair.sender
    gc.collect()
    assert hooks == []


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
