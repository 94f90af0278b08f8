# SPDX-License-Identifier: Apache-2.0
"""`serve_prefill` goes on: while nobody asks, after wrong requests, after clients that vanish."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

from tvm_pagedkv.transfer import (
    ChannelClosed,
    Sender,
    SharedMemoryChannel,
    TransferError,
    TransferTimeout,
)
from tvm_pagedkv_lm import DecoderModel, SamplingParams, generate
from tvm_pagedkv_lm.engine.disaggregated import (
    RemotePrefill,
    _decode_logits,
    _described,
    serve_prefill,
)
from tvm_pagedkv_lm.model.included import TINY

TOKENS = list(range(3, 60))


class Service:
    """`serve_prefill` in a thread, and a client whose messages can be anything."""

    def __init__(self, model, monkeypatch, timeout=30.0, **options):
        self.caches = []
        create = model.create_cache

        def create_cache(*arguments, **fields):
            self.caches.append(create(*arguments, **fields))
            return self.caches[-1]

        monkeypatch.setattr(model, "create_cache", create_cache)
        self.target = create(8, 1024)
        self.socket, there = socket.socketpair()
        self.pool = ThreadPoolExecutor(1)
        options = {"prefill_chunk_size": 16, "timeout": timeout} | options
        self.done = self.pool.submit(serve_prefill, model, SharedMemoryChannel(there), **options)
        self.client = RemotePrefill(model, self.target, SharedMemoryChannel(self.socket), 10.0)
        self.channel = self.client._receiver.channel
        self.num_served = 0

    def check(self, model) -> None:
        """A prompt gives the logits that it gives here."""
        seq_id = 100 + self.num_served
        self.target.add_sequence(seq_id)
        (logits,) = self.client.prefill([(seq_id, TOKENS)])
        self.num_served += 1
        local = model.create_cache(1, 128)
        self.caches.pop()
        local.add_sequence(0)
        (expected,) = model.prefill(local, [0], [TOKENS])
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)

    def finish(self) -> None:
        """The client ends, and so does the service; it holds nothing."""
        self.client.close()
        assert self.done.result(10.0) == self.num_served
        self.check_nothing_is_held()

    def check_nothing_is_held(self) -> None:
        (cache,) = self.caches
        stats = cache.stats()
        names = ("num_used_pages", "num_pinned_pages", "num_send_blocks")
        assert [stats[name] for name in names] == [0, 0, 0] and cache.sequence_ids() == []
        cache.check_integrity()


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


@pytest.fixture
def start(model, monkeypatch):
    services = []

    def begin(**options):
        services.append(Service(model, monkeypatch, **options))
        return services[-1]

    yield begin
    for service in services:
        service.socket.close()
        service.pool.shutdown()


def test_a_client_that_takes_its_time(model, start, monkeypatch):
    """The service waits for a request again and again."""
    real, calls = Sender.next_request, []

    def next_request(sender):
        calls.append(sender)
        return real(sender, 0.02)

    monkeypatch.setattr(Sender, "next_request", next_request)
    service = start()
    for _ in range(2):
        num_calls = len(calls)
        while len(calls) < num_calls + 3 and not service.done.done():
            time.sleep(0.01)
        service.check(model)
    service.finish()


def test_a_client_that_never_says_hello(model):
    one, other = (SharedMemoryChannel(end) for end in socket.socketpair())
    with pytest.raises(TransferTimeout, match="did not say hello"):
        serve_prefill(model, other, timeout=0.1)
    one.receive(1.0)
    with pytest.raises(ChannelClosed):
        one.receive(1.0)
        one.receive(1.0)


REQUEST = {"type": "request", "id": 7, "begin": 0, "length": 3, "slots": [1, 0, 3]}
REQUEST |= {"payload": {"tokens": [1, 2, 3]}}
WRONG_REQUESTS = {
    "id_text": ({"id": "7"}, "id is '7'"),
    "id_none": ({"id": None}, "id is None"),
    "id_bool": ({"id": True}, "id is True"),
    "begin": ({"begin": -1}, "3 positions from -1 on"),
    "begin_late": ({"begin": 1}, "tokens of a prompt from its beginning on"),
    "begin_huge": ({"begin": 2**31}, "from 2147483648 on"),
    "begin_wide": ({"begin": 10**40}, "from 1000"),
    "length_zero": ({"length": 0, "slots": [0]}, "0 positions"),
    "length_text": ({"length": "3"}, "length is '3'"),
    "length_other": ({"length": 4}, "covers 4 positions but has 3 slots"),
    "slots_none": ({"slots": None}, "slots is None"),
    "slots_empty": ({"slots": []}, "but has 0 slots"),
    "slots_texts": ({"slots": ["1", 0, 3]}, "'1' in slots"),
    "slots_wide": ({"slots": [1, 2**63, 3]}, "in slots"),
    "slots_cut": ({"slots": [2, 0, 3]}, "should have 2 runs|numbers|runs"),
    "slots_many": ({"slots": [1, 0, 3, 1, 0, 3]}, "numbers after|groups"),
    "slots_far": ({"slots": [1, 10**6, 3]}, "slot 1000000|slots from 1000000"),
    "slots_negative": ({"slots": [1, -1, 3]}, "slot -1"),
    "payload_none": ({"payload": None}, "expected 3 tokens"),
    "payload_list": ({"payload": [1, 2, 3]}, "expected 3 tokens"),
    "tokens_few": ({"payload": {"tokens": [1, 2]}}, "expected 3 tokens"),
    "tokens_texts": ({"payload": {"tokens": ["a", "b", "c"]}}, r"'a' is not in \[0"),
    "tokens_bool": ({"payload": {"tokens": [1, True, 2]}}, r"True is not in \[0"),
    "tokens_negative": ({"payload": {"tokens": [1, -1, 2]}}, r"-1 is not in \[0"),
    "tokens_lists": ({"payload": {"tokens": [[1], [2], [3]]}}, r"is not in \[0"),
    "type": ({"type": "offer"}, "of type 'offer'"),
    "type_list": ({"type": [1]}, r"of type \[1\]"),
    "type_none": ({"type": None}, "of type None"),
    "read": ({"type": "read", "block": 3}, "was let go before it was read"),
    "read_text": ({"type": "read", "block": "3"}, "block is '3'"),
    "long_text": ({"type": "x" * 10**6}, r"xxx\.\.\."),
}


@pytest.mark.parametrize("name", list(WRONG_REQUESTS))
def test_wrong_requests(model, start, name):
    changes, text = WRONG_REQUESTS[name]
    service = start()
    message = REQUEST | changes
    service.channel.send(message)
    reply = service.channel.receive(10.0)
    assert reply["type"] == "failed" and len(reply["reason"]) < 1000
    assert reply["id"] == (message["id"] if type(message["id"]) is int else None)
    with pytest.raises(TransferError, match=text):
        raise TransferError(reply["reason"])
    service.check(model)
    service.finish()


@pytest.mark.parametrize("data", [b"{]", b"\xff\xfe", b"7", b"null", b"[" * 10000, b""], ids=repr)
def test_messages_that_are_none(model, start, data):
    service = start()
    service.socket.sendall(struct.pack("<I", len(data)) + data)
    reply = service.channel.receive(10.0)
    assert (reply["type"], reply["id"]) == ("failed", None)
    assert "not JSON" in reply["reason"] or "not a message" in reply["reason"]
    service.check(model)
    service.finish()


def test_a_prompt_that_does_not_fit(model, start):
    """Also the chunks that were computed before are let go."""
    service = start(max_total_tokens=32)
    service.target.add_sequence(0)
    with pytest.raises(TransferError, match="the sender gave up"):
        service.client.prefill([(0, TOKENS)])
    assert service.target.sequence_length(0) == 0
    (logits,) = service.client.prefill([(0, TOKENS[:20])])
    service.num_served += 1
    service.finish()


def test_a_model_that_fails(model, start, monkeypatch):
    """An error that is nobody's request is the client's as well; the service goes on."""
    service = start()

    def fail(*_):
        monkeypatch.undo()
        raise IndexError("a defect")

    monkeypatch.setattr(model, "prefill", fail)
    service.target.add_sequence(0)
    with pytest.raises(TransferError, match="IndexError: a defect"):
        service.client.prefill([(0, TOKENS)])
    service.target.add_sequence(1)
    service.client.prefill([(1, TOKENS)])
    service.num_served = 1
    service.finish()


def test_an_id_that_is_used_twice(model, start):
    service = start()
    service.channel.send(REQUEST)
    service.channel.send(REQUEST)
    types = set()
    while "failed" not in types:
        reply = service.channel.receive(5.0)
        types.add(reply["type"])
    assert "made request 7 already" in reply["reason"]
    service.client.close()
    service.done.result(10.0)
    service.check_nothing_is_held()


def test_more_requests_than_can_wait(model, start):
    service = start()
    for number in range(1300):
        service.channel.send(REQUEST | {"id": 1000 + number})
    while True:
        reply = service.channel.receive(5.0)
        if reply["type"] == "failed":
            break
    assert "1024 requests of the receiver wait already" in reply["reason"]
    service.client.close()
    service.done.result(10.0)
    service.check_nothing_is_held()


@pytest.mark.parametrize("when", ["at_once", "offered", "read"])
def test_a_client_that_vanishes(model, start, when):
    """A client that goes away in the middle of its request leaves nothing behind."""
    service = start()
    receiver = service.client._receiver
    service.target.add_sequence(0)
    ticket = receiver.request(0, len(TOKENS), {"tokens": TOKENS})
    if when == "offered":
        assert service.channel.receive(10.0)["type"] == "offer"
    elif when == "read":
        while not ticket.read:
            receiver.poll(1.0)
    service.socket.close()
    assert service.done.result(60.0) in (0, 1)
    service.check_nothing_is_held()


def test_a_client_that_does_not_answer(model, start):
    """When its time limit ends the service frees what it holds and serves the next request."""
    service = start(timeout=0.2)
    service.channel.send(REQUEST)
    replies = []
    while not replies or replies[-1]["type"] != "failed":
        replies.append(service.channel.receive(10.0))
    assert "did not finish" in replies[-1]["reason"]
    service.channel.send(REQUEST | {"payload": None})
    assert "expected 3 tokens" in service.channel.receive(10.0)["reason"]
    service.finish()


def test_an_interrupt_of_the_client(model, start, monkeypatch):
    """The sequences are as before, also the one that was complete."""
    service = start()
    receiver, wait = service.client._receiver, service.client._receiver.wait

    def interrupted(ticket):
        if ticket.seq_id == 1:
            raise KeyboardInterrupt
        return wait(ticket)

    monkeypatch.setattr(receiver, "wait", interrupted)
    for seq_id in range(3):
        service.target.add_sequence(seq_id)
    with pytest.raises(KeyboardInterrupt):
        service.client.prefill([(seq_id, TOKENS) for seq_id in range(3)])
    assert [service.target.sequence_length(seq_id) for seq_id in range(3)] == [0, 0, 0]
    assert service.target.stats()["num_used_pages"] == 0
    service.target.check_integrity()
    service.client.close()
    service.done.result(10.0)
    service.check_nothing_is_held()


@pytest.mark.parametrize("fault", ["prompt", "settings", "cache", "nothing", "never begun"])
def test_generate_closes_its_channel(model, fault):
    """Whether it raises before the run, or its events are never asked for."""
    here, there = socket.socketpair()
    settings = {"kv_transfer_channel": SharedMemoryChannel(here)}
    if fault == "settings":
        settings["prefill_chunk_size"] = 0
    elif fault == "cache":
        settings |= {"cache": model.create_cache(1, 64), "max_num_sequences": 2}
    prompts = [[]] if fault == "prompt" else ["x"]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_prefill, model, SharedMemoryChannel(there), timeout=20.0)
        try:
            if fault in ("nothing", "never begun"):
                events = generate(model, prompts, SamplingParams(max_tokens=2), **settings)
                if fault == "nothing":
                    assert [*events]
                del events
            else:
                with pytest.raises(ValueError):
                    generate(model, prompts, SamplingParams(max_tokens=2), **settings)
            assert served.result(10.0) == (fault == "nothing")
        finally:
            settings["kv_transfer_channel"].close()  # so that a mistake does not wait for ever


def test_logits_that_are_none():
    for wrong in (None, 7, "###", "AAA=", ["AAAA"]):
        with pytest.raises(TransferError, match="did not send logits"):
            _decode_logits(wrong, 258)
    with pytest.raises(TransferError, match="sent 1 logits, expected 258"):
        _decode_logits("AACAPw==", 258)


def changed_copy(folder, change, **fields) -> DecoderModel:
    """The small model with other weights, and other fields of its configuration."""
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return DecoderModel.from_pretrained(folder)


def with_other_layer(weights):
    name = "model.layers.0.self_attn.v_proj.weight"
    return weights | {name: weights[name][::-1].copy()}


def with_more_tokens(weights):
    return {
        name: np.concatenate([each, each[:6]]) if "embed" in name or "lm_head" in name else each
        for name, each in weights.items()
    }


@pytest.mark.parametrize("difference", ["weights", "vocabulary", "precision"])
def test_ends_with_different_models(model, tmp_path, difference):
    """Both ends get the same error, before a prompt is sent."""
    if difference == "weights":
        other, text = changed_copy(tmp_path / "other", with_other_layer), "model.content_digest"
    elif difference == "vocabulary":
        size = model.config.vocab_size
        other = changed_copy(tmp_path / "other", with_more_tokens, vocab_size=size + 6)
        text = "model.content_digest"
    else:
        other, text = DecoderModel.from_pretrained(weights="int8"), "model.precision"
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_prefill, other, SharedMemoryChannel(there), timeout=10.0)
        message = f"the models of the two sides differ: {text} is"
        with pytest.raises((ValueError, ChannelClosed), match=message):
            generate(model, ["x"], kv_transfer_channel=SharedMemoryChannel(here))
        with pytest.raises((ValueError, ChannelClosed), match=message):
            served.result(20.0)


def test_a_copy_of_the_model_is_the_same(model, tmp_path):
    assert changed_copy(tmp_path / "copy", dict).content_digest != ""
    shutil.copytree(TINY, tmp_path / "exact")
    exact = DecoderModel.from_pretrained(tmp_path / "exact")
    assert exact.content_digest == model.content_digest
    budget = DecoderModel.from_pretrained(attention_budget=32)
    assert _described(budget) == _described(exact) == _described(model)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
