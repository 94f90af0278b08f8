# SPDX-License-Identifier: Apache-2.0
"""What every store does, each through the same cases."""

from __future__ import annotations

import pytest

from tvm_pagedkv.stores import (
    DiskStore,
    GuardedStore,
    TieredStore,
    ValkeyStore,
)

from ..support.cases.caches.store_cases import Values, get, key_of, put

SIZES = [1, 63, 4032, 4033, 4095, 4096, 4097, 65_536, 100_000, 262_144 + 64, 1 << 20]
KEYS = [key_of(i) for i in range(len(SIZES))]


@pytest.fixture(params=["disk", "guarded disk", "tiered", "valkey", "mooncake"])
def store(request, tmp_path):
    def disk(name, max_bytes=64 << 20):
        return DiskStore(tmp_path / name, max_bytes)

    if request.param == "disk":
        made = disk("store")
    elif request.param == "guarded disk":
        made = GuardedStore(disk("store"), deadline=60)
    elif request.param == "tiered":
        made = TieredStore([disk("near"), disk("far")])
    elif request.param == "valkey":
        server = request.getfixturevalue("valkey")
        made = ValkeyStore(f"valkey://127.0.0.1:{server.port}", prefix=str(tmp_path))
    else:
        yield request.getfixturevalue("mooncake_store")  # which closes it: that takes a second
        return
    yield made
    made.close()


@pytest.mark.parametrize("shift", [0, 64, 4095], ids="shift {}".format)
def test_values_come_back(store, shift):
    assert store.exists(KEYS) == get(store, KEYS, SIZES) == [False] * len(KEYS)
    assert all(put(store, KEYS, SIZES, shift))
    assert all(store.exists(KEYS))
    assert all(get(store, KEYS, SIZES, shift))
    assert all(get(store, KEYS[::-1], SIZES[::-1], 4 * shift % 4096))


def test_some_keys_are_missing(store):
    assert all(put(store, KEYS[::2], SIZES[::2]))
    expected = [i % 2 == 0 for i in range(len(KEYS))]
    assert store.exists(KEYS) == expected
    assert get(store, KEYS, SIZES) == expected


def test_another_size_is_a_miss(store):
    assert all(put(store, KEYS, SIZES))
    for sizes in ([size + 1 for size in SIZES], [max(1, size // 2) + 1 for size in SIZES]):
        assert not any(get(store, KEYS, sizes))
    assert all(get(store, KEYS, SIZES))


def test_put_again(store):
    for _ in range(3):
        assert all(put(store, KEYS[5:], SIZES[5:]))
        assert all(get(store, KEYS[5:], SIZES[5:]))


def test_equal_keys_in_a_batch(store):
    keys, sizes = [KEYS[7]] * 3, [SIZES[7]] * 3
    assert put(store, keys, sizes) == [True] * 3
    assert get(store, keys, sizes) == store.exists(keys) == [True] * 3


def test_large_batches(store):
    keys = [key_of(("many", i)) for i in range(300)]
    assert all(put(store, keys, [70_000] * 300))
    assert all(store.exists(keys))
    assert all(get(store, keys, [70_000] * 300))


def test_an_empty_batch(store):
    assert store.exists([]) == store.get_into([], [], []) == store.put_from([], [], []) == []


def test_registered_memory_works_the_same(store):
    values = Values([65_536] * 4)
    store.register(values.memory.ctypes.data, values.memory.nbytes)
    assert all(put(store, KEYS[:4], values.sizes))
    assert all(store.get_into(KEYS[:4], values.addresses, values.sizes))


@pytest.mark.parametrize("method", ["get_into", "put_from"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([b"short"], [4096], [1]), ValueError, "a key must have 32 bytes, got 5"),
        ((["a" * 32], [4096], [1]), TypeError, "a key must be bytes, got str"),
        (([b"k" * 32], [4096, 8192], [1]), ValueError, "equally long, got 1, 2 and 1"),
        (([b"k" * 32], [0], [1]), ValueError, "an address must be positive, got 0"),
        (([b"k" * 32], [4096], [0]), ValueError, "a size must be positive, got 0"),
    ],
)
def test_arguments_are_checked(store, method, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(store, method)(*arguments)


def test_a_closed_store_stays_closed(store):
    assert all(put(store, KEYS[:2], SIZES[:2]))
    store.close()
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.exists(KEYS[:2])
    with pytest.raises(ValueError, match="is closed"):
        get(store, KEYS[:2], SIZES[:2])
    with pytest.raises(ValueError, match="is closed"):
        put(store, KEYS[:2], SIZES[:2])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
