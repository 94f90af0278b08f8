# SPDX-License-Identifier: Apache-2.0
"""Transfers that fail: an error on both sides, both caches as before, no page lost."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.transfer import (
    ChannelClosed,
    Receiver,
    Sender,
    TransferError,
    TransferTimeout,
    local_channels,
)

from .python_kernels import LAYER, make_cache
from .python_tree_kernels import KERNELS_WITH_TREES
from .transfer_cases import append, caches, connect, pump, rows, state

SHORT = 0.05


class Pair:
    """A sequence of six positions on either side, and a request for nine more."""

    def __init__(self, **fields):
        self.source, self.target = caches(0, **fields)
        self.qkv = rows(0, 40)
        for cache in (self.source, self.target):
            cache.add_sequence(0)
            append(cache, 0, self.qkv[:6])
            cache.fork_sequence(0, 1)  # so that the last page is shared
        self.sender, self.receiver = connect(self.source, self.target, timeout=5.0)
        self.before = state(self.target)

    def begin(self):
        self.ticket = self.receiver.request(0, 9)
        return self.sender.next_request()

    def check(self):
        """The receiver's cache is as it was; the sender's holds nothing for anybody."""
        assert state(self.target) == self.before
        assert self.source.stats()["num_pinned_pages"] == 0
        assert self.source.stats()["num_send_blocks"] == 0
        self.source.check_integrity()
        self.target.check_integrity()


@pytest.fixture
def pair():
    return Pair()


LAYOUTS = {
    "heads": ({"layers": [LAYER | {"num_kv_heads": 4}] * 2}, r"layers\[0\].num_kv_heads is"),
    "dim": ({"layers": [LAYER, LAYER | {"qk_head_dim": 16}]}, r"layers\[1\].group is"),
    "window": ({"layers": [LAYER | {"kind": "mha_sliding", "window": 3}] * 2}, "kind is"),
    "count": ({"num_layers": 3}, "layers: "),
    "page": ({"page_size": 8}, "page_size is"),
    "dtype": ({"dtype": "float16"}, "kv_dtype is"),
    "rope": ({"rope_mode": 1}, "rope_mode is"),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_caches_that_do_not_fit_together(name):
    fields, text = LAYOUTS[name]
    one, other = local_channels()
    sender = Sender(make_cache(), one)
    with pytest.raises(ValueError, match=text):
        Receiver(make_cache(**fields), other)
    with pytest.raises(ValueError, match=text):
        sender.connect()
    with pytest.raises(ValueError, match=text):  # from now on
        sender.next_request()


def test_two_of_a_kind():
    one, other = local_channels()
    Sender(make_cache(), one)
    with pytest.raises(ValueError, match="both ends of the channel belong to a sender"):
        Sender(make_cache(), other)


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
        _mark(pair.source, Shape([1, 0, 9]))


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


def _mark(cache, slots, seq_id=0, begin=0, peer=0):
    mark = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_mark_send")
    return mark(cache, seq_id, begin, slots, peer)


MARKS = {  # the receiver has 64 slots
    "empty": (ValueError, "0 groups", {"slots": Shape([])}),
    "no_runs": (ValueError, "0 runs", {"slots": Shape([0])}),
    "runs_min": (ValueError, "runs", {"slots": Shape([-(2**63), 0, 1])}),
    "runs_max": (ValueError, "runs", {"slots": Shape([2**63 - 1, 0, 1])}),
    "cut": (ValueError, "should have 2 runs", {"slots": Shape([2, 0, 1])}),
    "more": (ValueError, "2 numbers after", {"slots": Shape([1, 0, 1, 7, 7])}),
    "negative": (ValueError, "slot -1", {"slots": Shape([1, -1, 1])}),
    "slot_min": (ValueError, "slot -9223372036854775808", {"slots": Shape([1, -(2**63), 1])}),
    "outside": (ValueError, "slot 64", {"slots": Shape([1, 64, 1])}),
    "reach": (ValueError, "a run of 5 slots from 60", {"slots": Shape([1, 60, 5])}),
    "length_zero": (ValueError, "a run of 0", {"slots": Shape([1, 3, 0])}),
    "length_max": (ValueError, "a run of", {"slots": Shape([1, 3, 2**63 - 1])}),
    "overlap": (ValueError, "slot 11 twice", {"slots": Shape([2, 8, 4, 11, 2])}),
    "begin": (ValueError, "from -1 on", {"slots": Shape([1, 0, 4]), "begin": -1}),
    "begin_max": (ValueError, "cannot send", {"slots": Shape([1, 0, 4]), "begin": 2**63 - 1}),
    "sequence": (KeyError, "no sequence 9", {"slots": Shape([1, 0, 4]), "seq_id": 9}),
    "peer": (ValueError, "no receiver 5", {"slots": Shape([1, 0, 4]), "peer": 5}),
    "none": (TypeError, "", {"slots": None}),
}


@pytest.mark.parametrize("name", list(MARKS))
def test_marks(pair, name):
    error, text, arguments = MARKS[name]
    before = state(pair.source)
    with pytest.raises(error, match=text or None):
        _mark(pair.source, **arguments)
    assert state(pair.source) == before
    pair.check()


def test_marks_of_groups_and_windows():
    layers = [LAYER, LAYER | {"kind": "mha_sliding", "window": 3}]
    source, target = caches(0, layers=layers, max_total_tokens=256)
    sender, _ = connect(source, target)
    source.add_sequence(0)
    append(source, 0, rows(0, 30))
    before = state(source)
    for numbers, text in (
        ([1, 0, 30], "has 1 groups"),
        ([1, 0, 30, 1, 0, 20], "group 1 has 20 positions, that of group 0 has 30"),
        ([2, -1, 10, 0, 20, 2, -1, 10, 0, 20], "slot -1 in the position map of group 0"),
        ([1, 0, 30, 2, 0, 10, -1, 20], "slot -1 in the position map of group 1"),
        ([1, 0, 30, 2, -1, 2, 0, 28], "position 2 of sequence 0 is gone"),
    ):
        with pytest.raises(ValueError, match=text):
            _mark(source, Shape(numbers))
        assert state(source) == before
    assert sender.error is None


def test_within_a_step(pair):
    prepare = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")
    with pair.source.forward([1], [1]):
        with pytest.raises(ValueError, match="prepare_recv is not possible within a step"):
            prepare(pair.source, 0, 1)
        with pytest.raises(ValueError, match="mark_send is not possible within a step"):
            _mark(pair.source, Shape([1, 0, 4]))


OFFERS = {
    "backwards": ({"begin": 5}, r"offers positions \[5, 9\)"),
    "gap": ({"begin": 7}, "expected some from 6"),
    "beyond": ({"end": 16}, "expected some from 6 up to 15"),
    "groups": ({"runs": []}, "0 groups of 1"),
    "slots": ({"destination": 1}, "other slots"),
    "count": ({"count": -1}, "other slots"),
    "source": ({"source": 1 << 40}, "other slots"),
    "source_negative": ({"source": -1000}, "other slots"),
    "ragged": ({"runs": [[1, 2]]}, "no runs"),
    "text": ({"runs": [["a", 1, 2]]}, "no runs"),
    "huge": ({"runs": [[2**70, 1, 2]]}, "no runs"),
    "begin_text": ({"begin": "6"}, "begin is '6', which is no int"),
    "block": ({"block": None}, "block is None"),
}


@pytest.mark.parametrize("name", list(OFFERS))
def test_offers_that_are_wrong(pair, name):
    """What a sender says is checked before a byte is written."""
    changes, text = OFFERS[name]
    send = pair.sender.send(pair.begin(), 0)
    channel, real = pair.sender.channel, pair.sender.channel.send

    def tamper(message):
        if message["type"] == "offer":
            runs = np.array(message["runs"][0]).reshape(-1, 3)
            for column, key in enumerate(("source", "destination")):
                runs[:, column] += changes.get(key, 0)
            runs = runs[: changes.get("count", len(runs))]
            message = message | {"runs": [runs.ravel().tolist()]}
            message |= {k: v for k, v in changes.items() if k in ("begin", "end", "runs", "block")}
        real(message)

    channel.send = tamper
    append(pair.source, 0, pair.qkv[6:9])
    with pytest.raises(TransferError, match=text):
        pair.receiver.wait(pair.ticket)
    pair.sender.poll()
    with pytest.raises(TransferError, match="the receiver gave up"):
        pair.sender.finish(send)
    pair.check()


MESSAGES = {
    "text": ("offer", "no message"),
    "list": ([1], "no message"),
    "type": ({"type": "x", "id": 1}, "of type 'x'"),
    "no_id": ({"type": "offer"}, "id is None"),
    "hello": ({"type": "hello"}, "hello twice"),
}


@pytest.mark.parametrize("name", list(MESSAGES))
def test_messages_that_are_none(pair, name):
    message, text = MESSAGES[name]
    pair.begin()
    pair.sender.channel.send(message)
    with pytest.raises(TransferError, match=text):
        pair.receiver.wait(pair.ticket)
    pair.check()
    with pytest.raises(ChannelClosed):
        pair.sender.poll()


def test_confirmations_of_nothing(pair):
    pair.begin()
    pair.sender.channel.send({"type": "confirmed", "id": pair.ticket.id, "block": 77})
    with pytest.raises(TransferError, match="confirms block 77"):
        pair.receiver.wait(pair.ticket)
    pair.check()


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
        _mark(source, Shape([1, 0, 9]))
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
            _mark(source, Shape([1, 0, 9]), seq_id)
    assert (state(source), state(target)) == before
    append(source, 1, rows(2, 4))
    sender.finish(send)
    pump(sender, receiver)
    assert ticket.is_done
    for cache in (source, target):
        cache.enable_sliding_window(1, 10, 2)
        cache.check_integrity()


def test_a_second_handler(pair):
    set_handler = tvm_ffi.get_global_func("pagedkv.set_send_handler")
    with pytest.raises(ValueError, match="receiver 0 has a handler already"):
        set_handler(pair.source, 0, tvm_ffi.convert(lambda block: None), Shape([64]))


@pytest.mark.parametrize("region", [(-1, 0, 4), (0, -1, 4), (0, 0, -1), (5, 0, 4), (0, 5, 4)])
@pytest.mark.parametrize("far", [1, 2**60])
def test_copies_outside_their_tensors(region, far):
    source, target = (tvm.runtime.tensor(np.full(8, x, "uint8")) for x in (1, 2))
    regions = tvm.runtime.tensor(np.array([(0, 4, 4), region], "int64") * [[1], [far]])
    with pytest.raises(IndexError, match="region 1 .* is not within 8 bytes"):
        tvm_ffi.get_global_func("pagedkv.copy_regions")(target, source, regions)
    np.testing.assert_array_equal(target.numpy(), np.full(8, 2))
