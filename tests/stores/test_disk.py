# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: what is kept, for how long, and who may read it."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib

import pytest

from tvm_pagedkv.stores import DiskStore

from ..support.cases.caches.store_cases import get, key_of, put
from ..support.harness.in_child import failures

LIMIT = 4 << 20
SIZE = 60_000  # slots of 64 KiB: four in each of 16 slabs
KEYS = [key_of(i) for i in range(200)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "parent" / "store"


def held(store, keys):
    """Which values are there, by reading them."""
    return [key for key, hit in zip(keys, get(store, keys, [SIZE] * len(keys)), strict=True) if hit]


def test_values_survive_a_restart(folder):
    store = DiskStore(folder, LIMIT)
    assert all(put(store, KEYS[:20], [SIZE] * 20))
    store.close()
    assert held(DiskStore(folder, LIMIT), KEYS[:30]) == KEYS[:20]


def test_two_stores_share_a_folder(folder):
    one, other = DiskStore(folder, LIMIT), DiskStore(folder, LIMIT)
    for i in range(0, 40, 4):
        assert all(put(one, KEYS[i : i + 2], [SIZE] * 2))
        assert all(put(other, KEYS[i + 1 : i + 4], [SIZE] * 3))
        assert held(one, KEYS[: i + 8]) == held(other, KEYS[: i + 8]) == KEYS[: i + 4]
    one.close()
    assert held(other, KEYS[:40]) == KEYS[:40]


def test_the_size_has_a_limit(folder):
    store = DiskStore(folder, LIMIT)
    for i in range(0, 200, 8):
        assert all(put(store, KEYS[i : i + 8], [SIZE] * 8))
        assert (folder / "data.bin").stat().st_size <= LIMIT
    assert held(store, KEYS) == KEYS[-64:]


def test_the_least_recently_used_values_go(folder):
    store = DiskStore(folder, LIMIT)
    assert all(put(store, KEYS[:48], [SIZE] * 48))
    for i in range(48, 180, 4):
        assert held(store, KEYS[:8]) == KEYS[:8]  # each read is a use
        assert put(store, KEYS[8:12], [SIZE] * 4) == [True] * 4  # and so is a put of what is there
        assert all(put(store, KEYS[i : i + 4], [SIZE] * 4))
    assert held(store, KEYS[:12]) == KEYS[:12]
    assert held(store, KEYS[12:48]) == []


def test_other_sizes_take_slabs_that_are_old(folder):
    """Values of a cache that is gone leave room to those of its successor."""
    store = DiskStore(folder, LIMIT)
    assert all(put(store, KEYS[:60], [SIZE] * 60))
    large = [key_of(("large", i)) for i in range(60)]
    for i in range(0, 60, 4):
        assert all(put(store, large[i : i + 4], [SIZE * 2] * 4))
    assert sum(get(store, large, [SIZE * 2] * 60)) >= 28
    assert len(held(store, KEYS[:60])) <= 4
    assert (folder / "data.bin").stat().st_size <= LIMIT


def test_a_batch_larger_than_the_store_keeps_a_part(folder):
    store = DiskStore(folder, LIMIT)
    stored = put(store, KEYS, [SIZE] * 200)
    assert 60 <= sum(stored) <= 64
    assert set(held(store, KEYS)) <= {key for key, kept in zip(KEYS, stored, strict=True) if kept}
    assert not any(put(store, [key_of("x")], [LIMIT // 16]))  # no slab has room for its footer


def test_another_size_of_a_key_replaces_the_value(folder):
    store = DiskStore(folder, LIMIT)
    for size in (SIZE, 70_000, 1000, SIZE):
        assert put(store, KEYS[:1], [size]) == [True]
        assert get(store, KEYS[:1] * 4, [SIZE, 70_000, 1000, 999]) == [
            each == size for each in (SIZE, 70_000, 1000, 999)
        ]


def test_prompts_are_private(folder):
    DiskStore(folder, LIMIT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert names == dict.fromkeys(("lock", "index.bin", "data.bin"), 0o600)
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="must belong to this user and have mode 0700.*0750"):
        DiskStore(folder, LIMIT)


def test_other_folders_are_refused(folder):
    folder.parent.mkdir()
    folder.mkdir(0o700)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="not the folder of a DiskStore: it has 'thesis.tex'"):
        DiskStore(folder, LIMIT)
    (folder / "thesis.tex").unlink()
    (folder / "index.bin").write_bytes(b"garbage" * 1000)
    with pytest.raises(ValueError, match="not the index of a DiskStore; remove the folder"):
        DiskStore(folder, LIMIT)
    (folder / "index.bin").unlink()
    DiskStore(folder, LIMIT)
    with pytest.raises(OSError, match="store|directory"):
        DiskStore(folder / "index.bin", LIMIT)


def patched(folder, offset, data, with_checksum=True):
    header = bytearray((folder / "index.bin").read_bytes()[:36])
    header[offset : offset + len(data)] = data
    if with_checksum:
        header[32:] = struct.pack("<I", zlib.crc32(bytes(header[:32])))
    with open(folder / "index.bin", "r+b") as file:
        file.write(header)


def test_other_versions_and_limits_are_refused(folder):
    DiskStore(folder, LIMIT).close()
    with pytest.raises(ValueError, match=f"made with max_bytes={LIMIT}, got {2 * LIMIT}; use that"):
        DiskStore(folder, 2 * LIMIT)
    patched(folder, 8, struct.pack("<I", 99))
    with pytest.raises(ValueError, match="has version 99, this needs version 1; remove the folder"):
        DiskStore(folder, LIMIT)
    patched(folder, 9, b"\1", with_checksum=False)
    with pytest.raises(ValueError, match="the header of .* is damaged"):
        DiskStore(folder, LIMIT)
    patched(folder, 8, struct.pack("<I", 1))
    os.truncate(folder / "index.bin", 10_000)
    with pytest.raises(ValueError, match="is cut off"):
        DiskStore(folder, LIMIT)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_bytes": 1000}, ValueError, "max_bytes must be between 1048576"),
        ({"max_bytes": 1.5e9}, TypeError, "max_bytes must be an integer"),
        ({"num_threads": 0}, ValueError, "num_threads must be between 1 and 64"),
        ({"lock_seconds": -1}, ValueError, "lock_seconds must be positive"),
    ],
)
def test_arguments_are_checked(arguments, error, message, folder):
    with pytest.raises(error, match=message):
        DiskStore(folder, **arguments)
    assert not folder.exists()


def test_a_process_that_has_the_lock_delays_writers_only(folder):
    store = DiskStore(folder, LIMIT, lock_seconds=0.05)
    assert all(put(store, KEYS[:4], [SIZE] * 4))
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another process has had the lock for 0.05 s"):
            put(store, KEYS[4:8], [SIZE] * 4)
        assert held(store, KEYS[:8]) == KEYS[:4]
    assert all(put(store, KEYS[4:8], [SIZE] * 4))


def test_a_damaged_value_does_not_cost_the_others_where_the_lock_is_taken(folder):
    store = DiskStore(folder, LIMIT, lock_seconds=0.05)
    assert all(put(store, KEYS[:4], [SIZE] * 4))
    with open(folder / "data.bin", "r+b") as data:
        data.write(b"damage")
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(held(store, KEYS[:4])) == 3
    assert len(held(store, KEYS[:4])) == 3
    assert sum(store.exists(KEYS[:4])) == 3  # the damaged one is removed


def test_a_forked_child_opens_its_own(folder):
    store = DiskStore(folder, LIMIT)
    assert all(put(store, KEYS[:4], [SIZE] * 4))

    def refused():
        with pytest.raises(RuntimeError, match="cannot be used after a fork"):
            held(store, KEYS[:4])

    def opened():
        assert held(DiskStore(folder, LIMIT), KEYS[:4]) == KEYS[:4]

    assert not failures([("refused", refused), ("opened", opened)], seconds=30)


def test_without_rights_the_error_is_clear(folder):
    """As another user, for root may write everywhere."""

    def denied():
        folder.parent.mkdir(mode=0o755)
        if os.getuid() == 0:
            os.setuid(65534)
        else:
            folder.parent.chmod(0o500)
        with pytest.raises(PermissionError, match="Permission denied"):
            DiskStore(folder, LIMIT)

    assert not failures([("denied", denied)], seconds=30)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
