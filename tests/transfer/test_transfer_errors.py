# SPDX-License-Identifier: Apache-2.0
"""Transfers that fail: an error on both sides, both caches as before, no page lost."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.transfer import (
    ChannelClosed,
    Sender,
    TransferError,
    TransferTimeout,
    _runtime,
    local_channels,
)
from tvm_pagedkv.transfer import receiver as receiver_module

from ..support.cases.caches.transfer_cases import (
    TransferPair,
    append,
    caches,
    connect,
    mark_send,
    pump,
    rows,
    state,
)
from ..support.emulators.python_kernels import make_cache
from ..support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ..support.worlds.permissive_steps import permissive_step

SHORT = 0.05


@pytest.fixture
def pair() -> TransferPair:
    return TransferPair()


def test_arguments():
    cache, (one, _) = make_cache(), local_channels()
    for arguments, error in (
        ((None, one), TypeError),
        ((cache, None), TypeError),
        ((cache, one, 0, 0.0), ValueError),
    ):
        with pytest.raises(error):
            Sender(*arguments)
    with pytest.raises(TransferTimeout, match="did not say hello"):
        Sender(cache, one).connect(SHORT)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_nothing_more_comes(pair, num_steps):
    request = pair.begin()
    send = pair.sender.send(request, 0)
    for _ in range(num_steps):
        append(pair.source, 0, pair.qkv[6:10])
    with pytest.raises(TransferTimeout, match=r"waits for positions \[6, 15\)"):
        pair.receiver.wait(pair.ticket, SHORT)
    with pytest.raises(TransferError, match="the receiver gave up"):
        pump(pair.sender, pair.receiver)
        pair.sender.finish(send)
    pair.check()
    with pytest.raises(TransferTimeout):  # again and again
        pair.receiver.wait(pair.ticket, SHORT)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["expand_map", "send", "sent"])
def test_a_request_that_fails_half_way(pair, monkeypatch, where, error):
    """Before or after the sender has got it; the sequence is as before, and can be asked for."""
    send = type(pair.receiver.channel).send

    def fail(*args):
        if where == "sent":
            send(*args)
        patch.undo()
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        if where == "expand_map":
            patch.setattr(receiver_module, "expand_map", fail)
        else:
            patch.setattr(type(pair.receiver.channel), "send", fail)
        pair.receiver.request(0, 9)
    pair.check()
    pair.sender.poll()
    with pytest.raises(TransferTimeout):
        pair.sender.next_request(SHORT)
    answer = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:15])
    pair.sender.finish(answer)
    pump(pair.sender, pair.receiver)
    assert pair.ticket.is_done


def test_an_answer_that_is_interrupted(pair, monkeypatch):
    request = pair.begin()

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_runtime, "send_id", fail)
        pair.sender.send(request, 0)
    pump(pair.sender, pair.receiver)
    assert "interrupted" in str(pair.ticket.error)
    pair.check()


def test_nobody_reads(pair):
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:15])
    pair.sender.finish(send)
    with pytest.raises(TransferTimeout, match="did not finish"):
        pair.sender.wait(send, SHORT)
    with pytest.raises(TransferError, match="did not finish|was let go before it was read"):
        pair.receiver.wait(pair.ticket)
    pair.check()


def test_a_read_that_comes_too_late(pair):
    """The sender lets a block go while the receiver believes to have read it."""
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:15])
    pair.sender.finish(send)
    pair.receiver.poll()  # has read, is not confirmed
    assert not pair.ticket.is_done and pair.ticket.read == 15
    with pytest.raises(TransferTimeout):
        # The answers lie in the channel; a sender that does not look lets go in the end.
        pair.sender.channel._inbox.messages.clear()
        pair.sender.wait(send, SHORT)
    with pytest.raises(TransferError, match="did not finish"):
        pair.receiver.wait(pair.ticket)
    pair.check()


def test_too_few_rows(pair):
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:14])
    with pytest.raises(
        ValueError, match=r"positions \[6, 15\), but sequence 0 has had those below 14"
    ):
        pair.sender.finish(send)
    with pytest.raises(TransferError, match="has had those below 14 only"):
        pair.receiver.wait(pair.ticket)
    pair.check()


def test_the_sender_removes_or_pops_what_is_wanted(pair):
    for spoil in (lambda c: c.pop_n(0, 1), lambda c: c.remove_sequence(0)):
        send = pair.sender.send(pair.begin(), 0)
        append(pair.source, 0, pair.qkv[6:9])
        spoil(pair.source)
        with pytest.raises(TransferError, match="removed, or popped behind position 9"):
            pair.sender.finish(send)
        with pytest.raises(TransferError, match="removed, or popped"):
            pair.receiver.wait(pair.ticket)
        pair.check()
        if 0 in pair.source.sequence_ids():
            pair.source.pop_n(0, 2)


@pytest.mark.parametrize("use", ["step", "pop", "remove", "fork", "clear"])
def test_the_receiver_uses_the_sequence_too_early(pair, use):
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:10])
    uses = {
        "step": lambda c: append(c, 0, pair.qkv[:1]),
        "pop": lambda c: c.pop_n(0, 2),
        "remove": lambda c: c.remove_sequence(0),
        "fork": lambda c: c.fork_sequence(0, 2),
        "clear": lambda c: c.clear(),
    }
    uses[use](pair.target)
    with pytest.raises(TransferError, match="was used while it was being received|no sequence 0"):
        pair.receiver.wait(pair.ticket)
    pair.target.check_integrity()
    with pytest.raises(TransferError, match="the receiver gave up"):
        pair.sender.finish(send)
        pair.sender.wait(send)
    assert pair.source.stats()["num_pinned_pages"] == 0


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_one_side_ends(pair, side):
    send = pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:15])
    getattr(pair, side).close()
    with pytest.raises(TransferError):
        pair.receiver.wait(pair.ticket)
    with pytest.raises(TransferError):
        pair.sender.finish(send)
        pair.sender.wait(send)
    pair.check()
    with pytest.raises(ValueError, match="no receiver 0"):
        mark_send(pair.source, Shape([1, 0, 9]))


def test_a_sender_that_is_forgotten(pair):
    pair.sender.send(pair.begin(), 0)
    append(pair.source, 0, pair.qkv[6:15])
    assert pair.source.stats()["num_pinned_pages"] > 0
    pair.sender = None
    assert pair.source.stats()["num_pinned_pages"] == 0


def test_a_step_does_not_fail_with_the_channel(pair):
    send = pair.sender.send(pair.begin(), 0)
    pair.receiver.channel.close()
    append(pair.source, 0, pair.qkv[6:15])
    assert pair.source.sequence_length(0) == 15
    with pytest.raises(ChannelClosed):
        pair.sender.finish(send)
        pair.sender.wait(send)
    pair.source.check_integrity()
    assert pair.source.stats()["num_pinned_pages"] == 0


def test_requests_that_do_not_fit(pair):
    for seq_id, length, error in (
        (0, 60, pkv.CacheFullError),
        (0, 0, ValueError),
        (0, 2**31, ValueError),
        (9, 1, KeyError),
    ):
        with pytest.raises(error):
            pair.receiver.request(seq_id, length)
        pair.check()
    assert not pair.sender.poll()


def test_a_request_is_refused(pair):
    pair.sender.refuse(pair.begin(), "too busy")
    with pytest.raises(TransferError, match="too busy"):
        pair.receiver.wait(pair.ticket)
    pair.check()


def test_a_request_is_cancelled(pair):
    request = pair.begin()
    send = pair.sender.send(request, 0)
    append(pair.source, 0, pair.qkv[6:15])
    pair.receiver.cancel(pair.ticket)
    with pytest.raises(TransferError, match="was cancelled"):
        pair.receiver.wait(pair.ticket)
    pair.sender.poll()
    with pytest.raises(TransferError, match="was cancelled"):
        pair.sender.finish(send)
    pair.check()


def test_within_a_step(pair):
    prepare = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")
    with permissive_step(pair.source, [1], [1]):
        with pytest.raises(ValueError, match="prepare_recv is not possible within a step"):
            prepare(pair.source, 0, 1)
        with pytest.raises(ValueError, match="mark_send is not possible within a step"):
            mark_send(pair.source, Shape([1, 0, 4]))


def test_token_trees_that_are_not_committed():
    """Their rows are not final: such a sequence neither receives nor is sent, nor grows a tree."""
    source, target = caches(0, KERNELS_WITH_TREES)
    for cache in (source, target):
        for seq_id in (0, 1):
            cache.add_sequence(seq_id)
            append(cache, seq_id, rows(0, 6))
        with cache.forward([0], [3], [-1, 0, 0]):
            for layer in range(2):
                cache.attention(layer, rows(1, 3))
    sender, receiver = connect(source, target)
    before = state(source), state(target)
    with pytest.raises(ValueError, match="cannot receive: its last positions are token tree nodes"):
        receiver.request(0, 4)
    with pytest.raises(ValueError, match="cannot be sent: its last positions are token tree nodes"):
        mark_send(source, Shape([1, 0, 9]))
    assert (state(source), state(target)) == before

    ticket = receiver.request(1, 4)
    send = sender.send(sender.next_request(), 1)
    before = state(source)
    with pytest.raises(ValueError, match="is being sent; it cannot have a token tree"):
        source.begin_forward([0, 1], [1, 2], [-1, -1, -1])
    assert state(source) == before
    source.commit_tree([0], [1])  # of another sequence
    append(source, 1, rows(2, 4))
    sender.finish(send)
    pump(sender, receiver)
    assert ticket.is_done
    for cache in (source, target):
        cache.check_integrity()


def test_windows_of_sequences():
    """Their positions leave behind the sinks: such a sequence neither receives nor is sent."""
    source, target = caches(0, sliding_window=True)
    for cache in (source, target):
        for seq_id in (0, 1):
            cache.add_sequence(seq_id)
            append(cache, seq_id, rows(0, 12))
        cache.enable_sliding_window(0, 10, 2)
        cache.fork_sequence(0, 2)  # no window, but a gap
    sender, receiver = connect(source, target)
    ticket = receiver.request(1, 4)
    send = sender.send(sender.next_request(), 1)
    before = state(source), state(target)
    for cache, text in ((source, "is being sent"), (target, "is receiving")):
        with pytest.raises(ValueError, match=f"{text}; it cannot get a window"):
            cache.enable_sliding_window(1, 10, 2)
    for seq_id, text in ((0, "it has a sliding window"), (2, "it has dropped positions")):
        with pytest.raises(ValueError, match=f"sequence {seq_id} cannot receive: {text}"):
            receiver.request(seq_id, 4)
        with pytest.raises(ValueError, match=f"sequence {seq_id} cannot be sent: {text}"):
            mark_send(source, Shape([1, 0, 9]), seq_id)
    assert (state(source), state(target)) == before
    append(source, 1, rows(2, 4))
    sender.finish(send)
    pump(sender, receiver)
    assert ticket.is_done
    for cache in (source, target):
        cache.enable_sliding_window(1, 10, 2)
        cache.check_integrity()


def test_a_receiver_that_is_forgotten(pair):
    """Nothing writes to the pages of its request any more, so the cache does not keep them."""
    pair.begin()
    assert pair.target.stats()["num_pinned_pages"] > 0
    pair.receiver = None
    assert pair.target.stats()["num_pinned_pages"] == 0
    pair.target.check_integrity()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
