# SPDX-License-Identifier: Apache-2.0
"""Transfers between two processes: over shared memory, and over NIXL where it is installed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tvm_pagedkv.transfer import (
    AuthenticationError,
    ChannelClosed,
    NixlChannel,
    Receiver,
    Sender,
    SharedMemoryChannel,
    TransferError,
    TransferTimeout,
)
from tvm_pagedkv.transfer.nixl import use_loopback

from .. import reference
from ..support.cases.caches import quantized_cache_cases
from ..support.cases.caches.checkpoint_cases import export
from ..support.cases.caches.quantized_cache_cases import CODEC_NAMES, QuantizedPair
from ..support.cases.caches.transfer_cases import HEADS, KV_HEADS, append, attend, rows, state
from ..support.emulators.python_kernels import LAYER, make_cache, poison, shuffle

TIMEOUT = 60.0  # until the other process has started
CHANNELS = {"shared_memory": SharedMemoryChannel, "nixl": NixlChannel}
WINDOWS = (0, 6)
LAYERS = [LAYER | ({"kind": "mha_sliding", "window": w} if w else {}) for w in WINDOWS]
SIZES = {"layers": LAYERS, "max_total_tokens": 512, "prefill_chunk_size": 64}

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed"
)
each_channel = pytest.mark.parametrize(
    "kind", ["shared_memory", pytest.param("nixl", marks=needs_nixl)]
)


def open_channel(kind: str, address: str, listen: bool = False):
    if kind == "nixl":
        use_loopback()
    channel = CHANNELS[kind]
    return (channel.listen if listen else channel.connect)(address, TIMEOUT)


def send_in_chunks(kind: str, address: str, chunk: int, stop_at: int) -> None:
    """The sender's process: answer requests; stop dead before position `stop_at`."""
    source = make_cache(enable_kv_transfer=True, **SIZES)
    shuffle(source, 1)
    with Sender(source, open_channel(kind, address), timeout=TIMEOUT) as sender:
        sender.connect()
        while True:
            try:
                request = sender.next_request()
            except ChannelClosed:
                return
            qkv = rows(request.payload, request.length)
            source.add_sequence(0)
            send = sender.send(request, 0)
            for begin in range(0, request.length, chunk):
                if begin >= stop_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                append(source, 0, qkv[begin : begin + chunk])
                sender.poll()
            source.remove_sequence(0)
            sender.finish(send, {"length": request.length})
            sender.wait(send)
            source.check_integrity()
            assert source.stats()["num_used_pages"] == 0


def die_in_the_middle(kind: str, address: str) -> None:
    """The receiver's process: ask, wait for a part, die."""
    target = make_cache(**SIZES)
    receiver = Receiver(target, open_channel(kind, address), timeout=TIMEOUT)
    target.add_sequence(0)
    ticket = receiver.request(0, 40, 3)
    while not ticket.read:
        receiver.poll(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    """Start a function in another process; it is gone when the test ends.

    It is a fork of one that has imported this file, and ends without the handlers of libraries that
    run at exit. With `is_new` it is a process as users start it.
    """
    processes = []

    def begin(function, kind, *arguments, is_new=False):
        address = str(tmp_path / "channel")
        context = multiprocessing.get_context("spawn" if is_new else "forkserver")
        context.set_forkserver_preload([__name__])  # tvm and torch are imported once
        process = context.Process(target=function, args=(kind, address, *arguments), daemon=True)
        process.start()
        processes.append(process)
        return process, open_channel(kind, address, listen=True)

    yield begin
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


@each_channel
def test_prompts_in_chunks(start, kind):
    process, channel = start(send_in_chunks, kind, 13, 1000, is_new=True)
    target = make_cache(**SIZES)
    shuffle(target, 0)
    poison(target)
    with Receiver(target, channel, TIMEOUT) as receiver:
        for seq_id, length in enumerate((37, 64, 1)):
            target.add_sequence(seq_id)
            ticket = receiver.request(seq_id, length, seq_id)
            assert receiver.wait(ticket) == {"length": length}
            qkv = np.concatenate([rows(seq_id, length), rows(100, 3)])
            poison(target)
            for out, window in zip(append(target, seq_id, qkv[length:]), WINDOWS, strict=True):
                expected = attend(qkv, 3, window or None)
                reference.assert_close(out, expected, "float32")
            target.check_integrity()
    process.join(10.0)
    assert process.exitcode == 0


@each_channel
def test_the_sender_dies(start, kind):
    process, channel = start(send_in_chunks, kind, 10, 20)
    target = make_cache(**SIZES)
    target.add_sequence(0)
    append(target, 0, rows(9, 6))
    target.fork_sequence(0, 1)
    target.add_sequence(2)
    before = state(target)
    receiver = Receiver(target, channel, TIMEOUT)
    ticket = receiver.request(2, 40, 5)
    with pytest.raises(TransferError) as raised:
        receiver.wait(ticket)
    assert not isinstance(raised.value, TransferTimeout)
    assert state(target) == before
    target.check_integrity()
    with pytest.raises(TransferError):
        receiver.request(2, 40)
    assert state(target) == before
    process.join(10.0)
    assert process.exitcode == -signal.SIGKILL


@each_channel
def test_the_receiver_dies(start, kind):
    process, channel = start(die_in_the_middle, kind)
    source = make_cache(enable_kv_transfer=True, **SIZES)
    source.add_sequence(0)
    sender = Sender(source, channel, timeout=TIMEOUT)
    send = sender.send(sender.next_request(), 0)
    append(source, 0, rows(3, 40)[:20])
    with pytest.raises(TransferError):
        sender.poll(TIMEOUT)
        sender.poll(TIMEOUT)
        append(source, 0, rows(3, 40)[20:])
        sender.finish(send)
        sender.wait(send)
    source.check_integrity()
    assert source.stats()["num_pinned_pages"] == 0
    k = source.debug_get_kv(0, source.first_position(0, 1))[0].numpy()  # goes on as if nothing was
    np.testing.assert_array_equal(
        k[0], rows(3, 40)[:, HEADS : HEADS + KV_HEADS][source.first_position(0, 1) :][: len(k[0])]
    )
    process.join(10.0)
    assert process.exitcode == -signal.SIGKILL


QUANTIZED_LAYERS = [quantized_cache_cases.LAYER, quantized_cache_cases.SLIDING_LAYER]
QUANTIZED_LAYERS += [quantized_cache_cases.MLA_LAYER]


def quantized_source(codec: str, seed: int = 1, **fields) -> QuantizedPair:
    """A cache with one sequence, the same one in both processes."""
    source = QuantizedPair(QUANTIZED_LAYERS, codec, seed=seed, **fields)
    source.add(7)
    return source


def feed(source: QuantizedPair, length: int, after_step) -> None:
    """Append rows in steps of several lengths."""
    for begin in range(0, length, 9):
        source.step([7], [min(9, length - begin)])
        after_step()


def send_quantized(kind: str, address: str, codec: str) -> None:
    """The sender's process: one sequence, as it grows."""
    source = quantized_source(codec, enable_kv_transfer=True)
    with Sender(source.cache, open_channel(kind, address), timeout=TIMEOUT) as sender:
        sender.connect()
        request = sender.next_request()
        send = sender.send(request, 7)
        feed(source, request.length, sender.poll)
        sender.finish(send, {"length": request.length})
        sender.wait(send)


@each_channel
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_quantized_rows(start, kind, codec):
    """Codes and scales arrive as they are, and the sequence goes on in the other process."""
    process, channel = start(send_quantized, kind, codec)
    target, twin = quantized_source(codec, seed=2), quantized_source(codec)
    with Receiver(target.cache, channel, TIMEOUT) as receiver:
        ticket = receiver.request(7, 31)
        assert receiver.wait(ticket) == {"length": 31}
    feed(twin, 31, lambda: None)
    for ours, theirs in zip(export(target.cache, 7)[1], export(twin.cache, 7)[1], strict=True):
        # Pages of the receiver may begin elsewhere in a window.
        common = min(ours.shape[1], theirs.shape[1])
        assert common > 0
        np.testing.assert_array_equal(ours.numpy()[:, -common:], theirs.numpy()[:, -common:])
    target.expected = twin.expected
    target.step([7], [3])
    target.step([7], [1])
    process.join(10.0)
    assert process.exitcode == 0


def test_shared_memory_needs_a_cache_for_it(tmp_path):
    one, other = _pair(SharedMemoryChannel)
    with pytest.raises(ValueError, match="enable_kv_transfer=True"):
        Sender(make_cache(), one)
    one.close()
    with pytest.raises(ChannelClosed):
        other.receive(1.0)
    with pytest.raises(TransferTimeout, match="nobody listens"):
        SharedMemoryChannel.connect(tmp_path / "nowhere", 0.0)
    with pytest.raises(TransferTimeout, match="no authenticated peer"):
        SharedMemoryChannel.listen(tmp_path / "here", 0.01)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x02\0\0\0{]", b"\x01\0\0\x007", b"\x02\0\0\0{}"], ids=repr
)
def test_bytes_that_are_no_messages(data):
    one, other = _pair(SharedMemoryChannel)
    receiver = Receiver(make_cache(), other)
    one._socket.send(data)
    with pytest.raises(TransferError):
        receiver.connect(1.0)


def test_nixl_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ImportError, match=r"pip install 'tvm-pagedkv\[nixl\]'"):
        _pair(NixlChannel)


@needs_nixl
def test_nixl_over_tcp_with_a_secret():
    use_loopback()
    secret = b"of both, and long enough"
    source, target = make_cache(**SIZES), make_cache(**SIZES)
    with NixlChannel.listener(("127.0.0.1", 0), secret) as listener:
        with pytest.raises(AuthenticationError):
            with ThreadPoolExecutor(1) as pool:
                accepted = pool.submit(listener.accept, 0.5)
                NixlChannel.connect(listener.address, TIMEOUT, b"another one, of no use")
        with pytest.raises(TransferTimeout, match="do not have the same secret"):
            accepted.result()
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, TIMEOUT)
            one = NixlChannel.connect(listener.address, TIMEOUT, secret)
    with Sender(source, one) as sender, Receiver(target, accepted.result()) as receiver:
        sender.connect()
        for cache in (source, target):
            cache.add_sequence(0)
        ticket = receiver.request(0, 20)
        send = sender.send(sender.next_request(), 0)
        append(source, 0, rows(0, 20))
        sender.finish(send)
        while not ticket.is_done:
            sender.poll()
            receiver.poll()
        k = target.debug_get_kv(0, 14)[0].numpy()
        np.testing.assert_array_equal(k[0], rows(0, 20)[14:, HEADS : HEADS + KV_HEADS])


@needs_nixl
def test_nixl_reads_that_the_sender_does_not_know_of():
    """A read answers DONE also when nobody was asked; the notification tells them apart."""
    use_loopback()
    one, other = _pair(NixlChannel)
    source, target = make_cache(**SIZES), make_cache(**SIZES)
    sender, receiver = Sender(source, one, timeout=0.2), Receiver(target, other, timeout=5.0)
    sender.connect()
    for cache in (source, target):
        cache.add_sequence(0)
    before = state(target)
    ticket = receiver.request(0, 20)
    send = sender.send(sender.next_request(), 0)
    append(source, 0, rows(0, 20))
    other._generation = "another"  # as if it had read in an earlier connection
    sender.finish(send)
    receiver.poll(1.0)
    with pytest.raises(TransferError, match="no read notification for block .* within"):
        sender.wait(send)
    with pytest.raises(TransferError, match="no read notification for block .* within"):
        receiver.wait(ticket)
    assert state(target) == before
    assert source.stats()["num_pinned_pages"] == 0
    sender.close()


def _pair(channel):
    one, other = socket.socketpair()
    return channel(one), channel(other)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
