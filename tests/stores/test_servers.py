# SPDX-License-Identifier: Apache-2.0
"""Stores whose servers are killed, restarted, full or not there."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from tvm_pagedkv.stores import GuardedStore, MooncakeStore, ValkeyStore

from ..support.cases.caches.store_cases import get, key_of, put
from ..support.emulators.store_servers import (
    mooncake_servers,
    reserved_port,
    skip_without_mooncake,
    valkey_server,
)

KEYS = [key_of(i) for i in range(8)]
SIZES = [70_000] * 8


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def url_of(server):
    return f"valkey://127.0.0.1:{server.port}"


def test_a_valkey_server_that_is_killed(tmp_path, caplog):
    clock = Clock()
    with valkey_server(tmp_path) as server:
        plain = ValkeyStore(url_of(server))
        guard = GuardedStore(ValkeyStore(url_of(server)), deadline=30, pause=5, clock=clock)
        assert all(put(guard, KEYS, SIZES)) and all(get(plain, KEYS, SIZES))
        server.kill()
        for call in (get, put):
            with pytest.raises(ConnectionError, match=f"Valkey server at valkey://.*{server.port}"):
                call(plain, KEYS, SIZES)
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                assert not any(get(guard, KEYS, SIZES))
            assert guard.is_open
            server.start()
            assert not any(put(guard, KEYS, SIZES))  # it is left alone for a while
            clock.now += 5
            assert not any(get(guard, KEYS, SIZES))  # its memory is empty
            assert not guard.is_open
        failed, recovered = (record.getMessage() for record in caplog.records)
        assert failed.startswith("ValkeyStore is unavailable; retrying every 5 s: ConnectionError")
        assert recovered == "ValkeyStore works again"
        assert all(put(guard, KEYS, SIZES)) and all(get(plain, KEYS, SIZES))
        guard.close()
        plain.close()


def test_a_full_valkey_server(tmp_path):
    """It evicts by its policy; one that may not evict refuses, which is no failure."""
    with valkey_server(tmp_path, "8mb") as server:
        store = ValkeyStore(url_of(server))
        keys = [key_of(i) for i in range(300)]
        for i in range(0, 300, 10):
            put(store, keys[i : i + 10], [70_000] * 10)
        assert 0 < sum(get(store, keys, [70_000] * 300)) < 120
        store._server.config_set("maxmemory-policy", "noeviction")
        kept = put(store, keys, [70_001] * 300)
        assert not all(kept)
        assert get(store, keys, [70_001] * 300) == kept
        store.close()


def test_values_expire(valkey, tmp_path):
    store = ValkeyStore(url_of(valkey), ttl=600, prefix=str(tmp_path))
    assert all(put(store, KEYS, SIZES))
    name = str(tmp_path).encode() + KEYS[0]
    assert 0 < store._server.pttl(name) <= 600_000
    store.close()
    lasting = ValkeyStore(url_of(valkey), prefix=str(tmp_path))
    assert all(put(lasting, KEYS, SIZES))
    assert lasting._server.pttl(name) == -1
    lasting.close()


def test_prefixes_separate(valkey, tmp_path):
    one, other = (ValkeyStore(url_of(valkey), prefix=f"{tmp_path}{i}") for i in range(2))
    assert all(put(one, KEYS, SIZES))
    assert not any(other.exists(KEYS))
    one.close()
    other.close()


def test_no_valkey_server():
    message = r"no Valkey server answers at 127.0.0.1:\d+/0: "
    with reserved_port() as port, pytest.raises(ConnectionError, match=message):
        ValkeyStore(f"valkey://user:secret@127.0.0.1:{port}/0")
    with pytest.raises(ValueError, match="url must name a Valkey server, got 'http://x'"):
        ValkeyStore("http://x")


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("redis", lambda: ValkeyStore("valkey://x"), r"pip install 'tvm-pagedkv\[valkey\]'"),
        ("mooncake", lambda: MooncakeStore("x:1"), r"'tvm-pagedkv\[mooncake\]'.*libibverbs1"),
    ],
)
def test_what_is_not_installed_is_named(module, make, message, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        make()


def test_mooncake_servers_that_are_killed(tmp_path):
    """The node and then the master: the caller has misses, never waits, and comes back."""
    skip_without_mooncake()
    clock = Clock()
    with mooncake_servers(tmp_path) as (master, client):
        plain = MooncakeStore(f"127.0.0.1:{master.port}")
        guard = GuardedStore(plain, deadline=30, failures=1, pause=5, clock=clock)
        assert all(put(guard, KEYS, SIZES)) and all(get(guard, KEYS, SIZES))
        client.kill()
        assert not any(get(guard, KEYS, SIZES))
        assert guard.is_open
        master.kill()
        clock.now += 5
        assert not any(get(guard, KEYS, SIZES))
        master.start()
        client.start()
        deadline = time.monotonic() + 60
        while True:
            clock.now += 5
            put(guard, KEYS, SIZES)
            if all(get(guard, KEYS, SIZES)):
                break
            assert time.monotonic() < deadline, (master.log.read_text(), client.log.read_text())
        assert not guard.is_open
        guard.close()


def test_mooncake_uses_registered_memory_in_place(mooncake_store):
    from ..support.cases.caches.store_cases import Values, value_of

    values = Values(SIZES)
    mooncake_store.register(values.memory.ctypes.data, values.memory.nbytes)
    for i, key in enumerate(KEYS):
        values[i][...] = value_of(key, SIZES[i])
    staged = bytes(mooncake_store._buffer[:1000])
    assert all(mooncake_store.put_from(KEYS, values.addresses, SIZES))
    assert bytes(mooncake_store._buffer[:1000]) == staged
    assert all(get(mooncake_store, KEYS, SIZES))
    mooncake_store._unregister(values.memory.ctypes.data)


def test_no_mooncake_master():
    skip_without_mooncake()
    message = "no mooncake_master answers"
    with reserved_port() as port, pytest.raises(ConnectionError, match=message):
        MooncakeStore(f"127.0.0.1:{port}")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
