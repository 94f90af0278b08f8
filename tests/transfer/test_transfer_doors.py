# SPDX-License-Identifier: Apache-2.0
"""Who may come to a transfer over TCP: those who know the secret, whatever others do meanwhile."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tvm_pagedkv.transfer import (
    AuthenticationError,
    ChannelClosed,
    SharedMemoryChannel,
    TransferError,
    TransferTimeout,
)

from ..support.cases.caches.transfer_cases import MessageChannel

SECRET = b"only the two sides know this"
OTHER = b"somebody else's, of some length"
HERE = ("127.0.0.1", 0)
VARIABLE = "TVM_PAGEDKV_TRANSFER_SECRET"


@pytest.fixture
def listener():
    with MessageChannel.listener(HERE, SECRET) as listener:
        yield listener


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def stranger():
    """Connects a plain socket; all are closed when the test ends."""
    sockets = []

    def connect(address, data: bytes = b""):
        connection = socket.create_connection(address)
        sockets.append(connection)
        connection.sendall(data)
        return connection

    yield connect
    for connection in sockets:
        connection.close()


@pytest.fixture
def fake_listener():
    """A listening socket that a thread serves with a function of the connection."""
    with socket.create_server(HERE) as server, ThreadPoolExecutor(1) as pool:

        def start(serve):
            def run():
                connection, _ = server.accept()
                with connection:
                    return serve(connection)

            return server.getsockname(), pool.submit(run)

        yield start


@pytest.fixture
def nobody():
    """An address at which nobody listens, held so that nobody else gets it."""
    with socket.socket() as holder:
        holder.bind(HERE)
        yield holder.getsockname()


def check_messages(one, other) -> None:
    one.send({"text": "to the other"})
    other.send({"text": "back"})
    assert other.receive(5.0) == {"text": "to the other"}
    assert one.receive(5.0) == {"text": "back"}


def test_a_tcp_address_needs_a_secret(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for call in (MessageChannel.listen, MessageChannel.connect, MessageChannel.listener):
        with pytest.raises(ValueError, match=f"needs a secret.*{VARIABLE}"):
            call(HERE)
        with pytest.raises(ValueError, match="at least 16 bytes, got 5") as raised:
            call(HERE, secret=b"abcde")
        assert "abcde" not in str(raised.value)
        with pytest.raises(TypeError, match="must be bytes, got str") as raised:
            call(HERE, secret="abcdefghijklmnopqrst")
        assert "abcdef" not in str(raised.value)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ValueError, match=f"{VARIABLE} must have at least 16 bytes"):
        MessageChannel.connect(HERE)


def test_no_other_way_in():
    """A TCP connection that did not go through the handshake makes no channel."""
    with socket.create_server(HERE) as server:
        with socket.create_connection(server.getsockname()) as connection:
            with pytest.raises(ValueError, match="must come from listen or connect"):
                MessageChannel(connection)
            with pytest.raises(ValueError, match="needs a Unix socket"):
                SharedMemoryChannel(connection)


@pytest.mark.parametrize("origin", ["argument", "environment"])
def test_the_right_secret(threads, monkeypatch, origin):
    secret = SECRET
    if origin == "environment":
        monkeypatch.setenv(VARIABLE, SECRET.decode())
        secret = None
    with MessageChannel.listener(HERE, secret) as listener:
        for _ in range(2):
            there = threads.submit(MessageChannel.connect, listener.address, 5.0, secret)
            one, other = listener.accept(5.0), there.result()
            check_messages(one, other)
            one.close()
            with pytest.raises(ChannelClosed):
                other.receive(5.0)
            other.close()
        assert SECRET.decode() not in repr(listener) + repr(one)
    with pytest.raises(TransferError, match="is closed"):
        listener.accept(0.0)


def test_a_wrong_secret_and_then_the_right_one(listener, threads, caplog):
    accepted = threads.submit(listener.accept, 10.0)
    with caplog.at_level(logging.WARNING, "tvm_pagedkv.transfer"):
        for _ in range(2):
            with pytest.raises(AuthenticationError, match="do not have the same secret"):
                MessageChannel.connect(listener.address, 5.0, OTHER)
        check_messages(MessageChannel.connect(listener.address, 5.0, SECRET), accepted.result())
    assert caplog.text.count("do not have the same secret") == 2
    assert SECRET.decode() not in caplog.text and OTHER.decode() not in caplog.text


def test_nobody_but_a_wrong_secret(threads):
    """Both sides learn of it."""
    with MessageChannel.listener(HERE, SECRET) as listener:
        there = threads.submit(MessageChannel.connect, listener.address, 5.0, OTHER)
        with pytest.raises(TransferTimeout, match="do not have the same secret") as raised:
            listener.accept(0.5)
        assert isinstance(raised.value.__cause__, AuthenticationError)
        with pytest.raises(AuthenticationError):
            there.result()


@pytest.mark.parametrize(
    ("count", "data"),
    [(100, b""), (3, b"G"), (3, b"GET / HTTP/1.1\r\n\r\n" * 4), (3, b"\xff" * 64)],
    ids=["silent", "G", "GET", "ff"],
)
def test_strangers_keep_nobody_waiting(threads, stranger, count, data):
    """Nobody waits for the end of their handshakes: it does not come."""
    with MessageChannel.listener(HERE, SECRET, handshake_seconds=1e6) as listener:
        accepted = threads.submit(listener.accept, 60.0)
        for _ in range(count):
            stranger(listener.address, data)
        channel = MessageChannel.connect(listener.address, 60.0, SECRET)
        check_messages(channel, accepted.result())


def test_a_silent_stranger_is_turned_away(stranger):
    with MessageChannel.listener(HERE, SECRET, handshake_seconds=0.1) as listener:
        connection = stranger(listener.address)
        with pytest.raises(TransferTimeout, match="did not prove itself within 0.1 s"):
            listener.accept(0.5)
        connection.settimeout(5.0)
        while connection.recv(100):  # the challenge; then the end
            pass


def test_a_listener_that_is_closed_forgets_strangers(listener, stranger):
    connection = stranger(listener.address)
    with pytest.raises(TransferTimeout):
        listener.accept(0.05)
    listener.close()
    connection.settimeout(5.0)
    while connection.recv(100):
        pass


GREETING = b"tvm_pagedkv 1\n" + b"n" * 32
ANSWERS = {
    "nothing": (b"", TransferTimeout),
    "a_part": (GREETING[:20], TransferTimeout),
    "no_proof": (GREETING, TransferTimeout),
    "zeros": (GREETING + bytes(32), AuthenticationError),
    "garbage": (b"220 mail.example.org ESMTP ready and waiting for you", AuthenticationError),
}


@pytest.mark.parametrize("name", list(ANSWERS))
def test_listeners_that_are_not_the_other_side(fake_listener, name):
    """They learn nothing but a digest, and do not hold up `connect`."""
    data, error = ANSWERS[name]

    def serve(connection):
        connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1000):
                received += piece
        return received

    address, received = fake_listener(serve)
    with pytest.raises(error):  # those that say something wrong need no time limit
        MessageChannel.connect(address, 0.3 if error is TransferTimeout else 60.0, SECRET)
    assert SECRET not in received.result() and len(received.result()) in (0, 64)


def test_a_digest_that_is_sent_back(fake_listener):
    """The digest of one role is of no use for the other one."""

    def serve(connection):
        connection.sendall(GREETING)
        nonce_and_digest = connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(nonce_and_digest[32:])

    address, _ = fake_listener(serve)
    with pytest.raises(AuthenticationError):
        MessageChannel.connect(address, 5.0, SECRET)


def test_a_listener_that_closes(fake_listener):
    address, _ = fake_listener(lambda connection: None)
    with pytest.raises(ChannelClosed, match="during the handshake"):
        MessageChannel.connect(address, 5.0, SECRET)


def test_messages_behind_the_handshake_are_kept(listener, stranger, threads):
    """Bytes that arrive together with the end of the handshake are a message."""
    accepted = threads.submit(listener.accept, 5.0)
    channel = MessageChannel.connect(listener.address, 5.0, SECRET)
    for number in range(100):
        channel.send({"number": number})
    for number in range(100):
        assert accepted.result().receive(5.0) == {"number": number}


def test_time_limits_cover_all_of_connect(fake_clock, nobody):
    for timeout in (0.0, 0.3):
        start = fake_clock.time
        with pytest.raises(TransferTimeout, match="nobody listens at 127.0.0.1:"):
            MessageChannel.connect(nobody, timeout, SECRET)
        assert fake_clock.time - start == pytest.approx(timeout)


def test_a_slow_name_service_is_not_waited_for(monkeypatch):
    stop = threading.Event()

    def slow(*_, flags, **__):
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        stop.wait()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(TransferTimeout, match="was not resolved in 0.2 s"):
        MessageChannel.connect(("far.example", 1), 0.2, SECRET)
    stop.set()


def test_a_full_backlog_does_not_stop_connect(fake_clock):
    """The kernel lets an attempt wait for minutes there."""
    server = socket.socket()
    server.bind(HERE)
    server.listen(0)
    waiting = []
    for _ in range(4):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(server.getsockname())
    with pytest.raises(TransferTimeout):
        MessageChannel.connect(server.getsockname(), 0.3, SECRET)
    assert fake_clock.time == pytest.approx(0.3)
    for connection in (server, *waiting):
        connection.close()


def test_a_host_with_several_addresses(monkeypatch, listener, nobody, threads):
    """One that cannot be reached or is not listened at does not hide the next."""
    targets = [("255.255.255.255", 1), nobody, listener.address]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", target) for target in targets]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    accepted = threads.submit(listener.accept, 5.0)
    check_messages(MessageChannel.connect(("some.example", 1), 5.0, SECRET), accepted.result())
    del found[1:]
    with pytest.raises(TransferError, match="cannot connect to some.example:1"):
        MessageChannel.connect(("some.example", 1), 5.0, SECRET)


def test_unknown_hosts(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for call in (MessageChannel.connect, MessageChannel.listener):
        with pytest.raises(TransferError, match="cannot resolve nobody.example:7: .*not known"):
            call(("nobody.example", 7), secret=SECRET)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        (("127.0.0.1",), TypeError),
        (("127.0.0.1", "7"), TypeError),
        (("127.0.0.1", True), TypeError),
        ((b"127.0.0.1", 7), TypeError),
        (("127.0.0.1", -1), ValueError),
        (("127.0.0.1", 1 << 16), ValueError),
        (("a" * 300, 7), TransferError),
        (7, TypeError),
        (None, TypeError),
        ("", ValueError),
        ("\0abstract", ValueError),
        (b"/nowhere", TypeError),
    ],
    ids=repr,
)
def test_addresses_that_are_none(address, error):
    for call in (MessageChannel.connect, MessageChannel.listen):
        with pytest.raises(error):
            call(address, 0.1, SECRET)


def test_a_port_that_is_taken(listener):
    with pytest.raises(TransferError, match="cannot listen at 127.0.0.1:"):
        MessageChannel.listener(listener.address, SECRET)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
