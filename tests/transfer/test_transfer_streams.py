# SPDX-License-Identifier: Apache-2.0
"""Arbitrary bytes from a socket give an error, and no memory or file is kept."""

from __future__ import annotations

import array
import gc
import mmap
import os
import resource
import socket
import struct
import threading

import pytest

from tvm_pagedkv.transfer import ChannelClosed, Receiver, Sender, SharedMemoryChannel, TransferError

from ..support.cases.caches.transfer_cases import MessageChannel
from ..support.emulators.python_kernels import make_cache


def open_descriptors() -> int:
    gc.collect()  # those of other tests
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("kind", "count"), [(MessageChannel, 1), (SharedMemoryChannel, 2), (SharedMemoryChannel, 250)]
)
def test_file_descriptors_that_nobody_asked_for(kind, count):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 2 * count + 100:
        pytest.skip(f"{limit} descriptors are too few")
    one, other = socket.socketpair()
    channel = kind(other)
    before = open_descriptors()
    source = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(one, [struct.pack("<I", 2) + b"{}"], [source] * count)
    os.close(source)
    with pytest.raises(TransferError, match="unexpected file descriptors"):
        channel.receive(1.0)
    assert open_descriptors() == before
    channel.close()
    one.close()


def test_file_descriptors_one_after_the_other():
    one, other = socket.socketpair()
    channel = SharedMemoryChannel(other)
    message = struct.pack("<I", 2) + b"{}"
    before = open_descriptors()
    with open("/dev/null") as source:
        socket.send_fds(one, [message], [source.fileno()])
        assert channel.receive(1.0) == {}
        assert [os.get_inheritable(descriptor) for descriptor in channel._descriptors_in] == [False]
        socket.send_fds(one, [message], [source.fileno()])
        with pytest.raises(TransferError, match="file descriptors"):
            channel.receive(1.0)
    assert open_descriptors() == before + 1
    del channel  # forgotten, not closed
    assert open_descriptors() <= before
    one.close()


def test_what_comes_beside_file_descriptors_is_ignored():
    """Credentials, which a process may send about itself, are no descriptors."""
    one, other = socket.socketpair()
    channel = SharedMemoryChannel(other)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    who = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
    data = struct.pack("<I", 2) + b"{}"
    one.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    assert channel.receive(1.0) == {} and channel._descriptors_in == []
    one.close()


STREAMS = {
    "huge": (b"\xff\xff\xff\xff", TransferError, "announces a message of 4294967295 bytes"),
    "just_too_long": (struct.pack("<I", (1 << 26) + 1), TransferError, "announces a message"),
    "cut": (b"\x10\0\0\0{", ChannelClosed, "in the middle of a message"),
    "cut_length": (b"\x10\0", ChannelClosed, "in the middle of a message"),
    "no_json": (b"\x02\0\0\0{]", TransferError, "is not JSON"),
    "no_text": (b"\x02\0\0\0\xff\xfe", TransferError, "is not JSON"),
    "deep": (struct.pack("<I", 1 << 20) + b"[" * (1 << 20), TransferError, "is not JSON"),
    "digits": (
        struct.pack("<I", 1 << 20) + b"1" * (1 << 20),
        TransferError,
        "not JSON|not a message",
    ),
    "number": (b"\x01\0\0\x007", TransferError, "not a message|not JSON|announces"),
}


@pytest.mark.parametrize("name", list(STREAMS))
def test_streams_that_are_none(name):
    """An error, and nothing is kept: no memory, no descriptor."""
    data, error, text = STREAMS[name]
    one, other = socket.socketpair()
    before = open_descriptors()
    receiver = Receiver(make_cache(), SharedMemoryChannel(other), timeout=5.0)
    one.setblocking(True)
    sent = threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR)))
    sent.start()
    with pytest.raises(error, match=text):
        receiver.connect(5.0)
    sent.join()
    assert len(receiver.channel._incoming) == 0
    assert open_descriptors() == before - 1  # `other` is closed as well
    one.close()


MEMORIES = {
    "none": {"layers": None},
    "few": {"layers": [[0, 8]]},
    "many": {"layers": [[0, 8]] * 3},
    "no_pairs": {"layers": [0, 8]},
    "triples": {"layers": [[0, 8, 8]] * 2},
    "texts": {"layers": [["0", "8"]] * 2},
    "fractions": {"layers": [[0.0, 8.0]] * 2},
    "negative": {"layers": [[0, 8], [-8, 8]]},
    "negative_size": {"layers": [[0, 8], [8, -8]]},
    "outside": {"layers": [[0, 8], [1 << 40, 8]]},
    "beyond": {"layers": [[0, 8], [0, 1 << 40]]},
    "huge": {"layers": [[0, 8], [1 << 62, 1 << 62]]},
    "wide": {"layers": [[0, 8], [1 << 70, 8]]},
    "kind": {"kind": "nixl"},
    "kind_list": {"kind": []},
}


@pytest.mark.parametrize("name", list(MEMORIES))
def test_descriptions_of_memory(monkeypatch, name):
    """A sender's description of its memory is validated before any is mapped."""
    one, other = (SharedMemoryChannel(end) for end in socket.socketpair())
    source, target = make_cache(enable_kv_transfer=True), make_cache()
    before = open_descriptors()
    expose = one.expose
    monkeypatch.setattr(one, "expose", lambda cache: expose(cache) | MEMORIES[name])
    Sender(source, one)
    with pytest.raises((TransferError, ValueError)) as raised:
        Receiver(target, other)
    if not name.startswith("kind"):
        assert isinstance(raised.value, TransferError)
    one.close()
    assert open_descriptors() <= before


FILES = {
    "pipe": (lambda: os.pipe()[0], "cannot map"),
    "file": (lambda: os.open(__file__, os.O_RDONLY), "cannot map"),
    "not_sealed": (lambda: os.memfd_create("test", os.MFD_ALLOW_SEALING), "could shrink"),
    "no_seals": (lambda: os.memfd_create("test"), "could shrink"),
}


@pytest.mark.parametrize("name", list(FILES))
def test_files_that_are_no_shared_memory(monkeypatch, name):
    make, text = FILES[name]
    one, other = (SharedMemoryChannel(end) for end in socket.socketpair())
    expose = one.expose

    def other_file(cache):
        memory = expose(cache)
        one._descriptors_out = [make()]
        return memory

    monkeypatch.setattr(one, "expose", other_file)
    Sender(make_cache(enable_kv_transfer=True), one)
    with pytest.raises(TransferError, match=text):
        Receiver(make_cache(), other)
    assert other._descriptors_in == []
    one.close()


def test_receivers_cannot_write_to_the_pages():
    one, other = (SharedMemoryChannel(end) for end in socket.socketpair())
    source = make_cache(enable_kv_transfer=True)
    Sender(source, one)
    other.receive(1.0)
    (descriptor,) = other._descriptors_in
    size = os.fstat(descriptor).st_size
    mmap.mmap(descriptor, size, access=mmap.ACCESS_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, size, access=mmap.ACCESS_WRITE)
    os.close(again)
    one.close()
    other.close()


def test_no_descriptors_for_the_sender():
    """Only receivers get one."""
    one, other = socket.socketpair()
    channel = SharedMemoryChannel(one)
    Sender(make_cache(enable_kv_transfer=True), channel)
    numbers = array.array("i", [0])
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
    other.sendmsg([struct.pack("<I", 2) + b"{}"], control)
    before = open_descriptors()
    with pytest.raises(TransferError, match="file descriptors"):
        channel.receive(1.0)
    assert open_descriptors() <= before
    channel.close()
    other.close()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
