# SPDX-License-Identifier: Apache-2.0
"""Who may come to a transfer over a Unix socket."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tvm_pagedkv.transfer import AuthenticationError, TransferError, TransferTimeout

from ..support.cases.caches.transfer_cases import MessageChannel
from ..support.harness.in_child import failures

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def as_nobody(function) -> list[str]:
    """Failures of a function in a process of another user."""

    def run():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        function()

    return failures([("as_nobody", run)])


def test_the_path_is_for_this_user_only(tmp_path, threads):
    path = tmp_path / "channel"
    mask = os.umask(0)
    try:
        with MessageChannel.listener(path) as listener:
            status = os.lstat(path)
            assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
            there = threads.submit(MessageChannel.connect, path, 5.0)
            one, other = listener.accept(5.0), there.result()
    finally:
        os.umask(mask)
    assert not path.exists()
    one.send({"text": 1})
    assert other.receive(5.0) == {"text": 1}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_folders_that_others_may_write_to(tmp_path, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    for call in (MessageChannel.listen, MessageChannel.connect):
        with pytest.raises(TransferError, match="other users may write to .*shared"):
            call(folder / "channel", 0.1)
    assert list(folder.iterdir()) == []
    private = folder / "private"
    private.mkdir(0o700)
    # Others cannot rename what is in a sticky folder, which /tmp is.
    error = TransferTimeout if mode & stat.S_ISVTX else TransferError
    for call in (MessageChannel.listen, MessageChannel.connect):
        with pytest.raises(TransferError) as raised:
            call(private / "channel", 0.1)
        assert type(raised.value) is error


def test_links_to_folders(tmp_path):
    """It is the folder behind the link that counts."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(TransferError, match="other users may write to .*shared"):
        MessageChannel.listen(tmp_path / "link" / "channel", 0.1)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(TransferError, match="circle"):
        MessageChannel.listen(tmp_path / "circle" / "channel", 0.1)


def test_paths_that_are_no_use(tmp_path):
    with pytest.raises(TransferError, match="cannot listen at .*No such file"):
        MessageChannel.listen(tmp_path / "missing" / "channel", 0.1)
    with pytest.raises(TransferTimeout, match="nobody listens"):
        MessageChannel.connect(tmp_path / "missing" / "channel", 0.1)
    (tmp_path / "file").write_text("")
    for call in (MessageChannel.listen, MessageChannel.connect):
        with pytest.raises(TransferError, match="up to 107 bytes"):
            call(tmp_path / ("x" * 108), 0.1)
        with pytest.raises(TransferError, match="file"):
            call(tmp_path / "file" / "channel", 0.1)
    with pytest.raises(TransferError, match="is not a socket"):
        MessageChannel.connect(tmp_path / "file", 0.1)
    with pytest.raises(TransferError, match="in use; remove it if"):
        MessageChannel.listen(tmp_path / "file", 0.1)
    assert (tmp_path / "file").exists()


def test_a_socket_that_was_left_behind(tmp_path, fake_clock):
    path = tmp_path / "channel"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with pytest.raises(TransferError, match="mode is 755, not 600"):
        MessageChannel.connect(path, 0.1)
    path.chmod(0o600)
    with pytest.raises(TransferTimeout, match="refused"):
        MessageChannel.connect(path, 0.2)
    assert fake_clock.time == pytest.approx(0.2)
    with pytest.raises(TransferError, match="in use; remove it if"):
        MessageChannel.listen(path, 0.1)


def test_a_full_backlog(tmp_path, fake_clock):
    path = str(tmp_path / "channel")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            with pytest.raises(TransferTimeout):
                MessageChannel.connect(path, 0.2)
            assert fake_clock.time == pytest.approx(0.2)


def test_a_secret_is_asked_for_where_it_is_given(tmp_path, threads):
    path, secret = tmp_path / "channel", b"sixteen bytes..."
    with MessageChannel.listener(path, secret) as listener:
        accepted = threads.submit(listener.accept, 5.0)
        with pytest.raises(AuthenticationError):
            MessageChannel.connect(path, 5.0, b"sixteen others..")
        channel = MessageChannel.connect(path, 5.0, secret)
        channel.send({"text": 1})
        assert accepted.result().receive(5.0) == {"text": 1}


# --- another user -------------------------------------------------------------------------------


@needs_root
def test_another_user_cannot_connect(tmp_path, threads):
    """Neither past the path's mode nor, where somebody has opened the path, past the listener."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/channel"

        def connect():
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                connection.settimeout(5.0)
                assert connection.recv(1) == b""

        with MessageChannel.listener(path) as listener:
            assert "PermissionError" in as_nobody(connect)[0]
            os.chmod(folder, 0o755)
            assert "PermissionError" in as_nobody(connect)[0]
            os.chmod(path, 0o666)
            accepted = threads.submit(listener.accept, 20.0)
            assert as_nobody(connect) == []
            os.chmod(path, 0o600)
            MessageChannel.connect(path, 5.0).send({"text": 1})
            assert accepted.result().receive(5.0) == {"text": 1}


@needs_root
def test_a_listener_of_another_user(tmp_path):
    """Sockets and folders of others are not used, nor is a path whose listener is another's."""
    path = tmp_path / "channel"
    with MessageChannel.listener(path):
        os.chown(path, NOBODY, -1)
        with pytest.raises(TransferError, match=f"channel belongs to user {NOBODY}"):
            MessageChannel.connect(path, 0.1)
    folder = tmp_path / "theirs"
    folder.mkdir(0o700)
    os.chown(folder, NOBODY, -1)
    for call in (MessageChannel.listen, MessageChannel.connect):
        with pytest.raises(TransferError, match=f"theirs belongs to user {NOBODY}"):
            call(folder / "channel", 0.1)

    path = tmp_path / "handed_over"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            server.listen(1)
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(AuthenticationError, match=f"is of user {NOBODY}, expected user 0"):
        MessageChannel.connect(path, 1.0)
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    server.close()


@needs_root
def test_a_user_who_is_not_root(tmp_path):
    """May talk to their own processes, in a folder of their own below /tmp."""

    def talk():
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path = f"{folder}/channel"
            with MessageChannel.listener(path) as listener:
                found = []
                thread = threading.Thread(
                    target=lambda: found.append(MessageChannel.connect(path, 5.0))
                )
                thread.start()
                listener.accept(5.0).send({"text": 1})
                thread.join()
            assert found[0].receive(5.0) == {"text": 1}

    assert as_nobody(talk) == []


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
