# SPDX-License-Identifier: Apache-2.0
"""Messages of peers and engines are validated before a byte is written."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

from tvm_pagedkv.transfer import ChannelClosed, Receiver, Sender, TransferError, local_channels

from ..support.cases.caches.transfer_cases import (
    TransferPair,
    append,
    caches,
    connect,
    mark_send,
    rows,
    state,
)
from ..support.emulators.python_kernels import LAYER, make_cache


@pytest.fixture
def pair() -> TransferPair:
    return TransferPair()


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
        mark_send(pair.source, **arguments)
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
            mark_send(source, Shape(numbers))
        assert state(source) == before
    assert sender.error is None


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
    "begin_text": ({"begin": "6"}, "begin is '6', which is not of type int"),
    "block": ({"block": None}, "block is None"),
}


@pytest.mark.parametrize("name", list(OFFERS))
def test_offers_that_are_wrong(pair, name):
    """A sender's messages are validated before a byte is written."""
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
    "text": ("offer", "not a message"),
    "list": ([1], "not a message"),
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


def test_copies_of_views():
    """Tensors that begin within others: the regions count from their own first bytes."""
    source, target = (
        tvm.runtime.tensor(np.arange(first, first + 8, dtype="uint8")) for first in (10, 20)
    )
    rows = tvm.runtime.tensor(np.array([[9, 9, 9], [1, 0, 2]], "int64"))
    views = (
        target._create_view((4,), "uint8", 2),
        source._create_view((4,), "uint8", 4),
        rows._create_view((1, 3), "int64", 24),
    )
    tvm_ffi.get_global_func("pagedkv.copy_regions")(*views)
    np.testing.assert_array_equal(target.numpy(), [20, 21, 22, 14, 15, 25, 26, 27])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
