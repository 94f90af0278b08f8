# SPDX-License-Identifier: Apache-2.0
"""`DiskStore` under kills, damage and full disks: a value is right, or it is a miss."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import resource
import secrets
import signal

import pytest

from tvm_pagedkv.stores import DiskStore

from ..support.cases.caches.store_cases import get, key_of, put
from ..support.harness.in_child import failures

LIMIT = 8 << 20
SIZES = [60_000, 65_536 + 64, 130_000]
NUM_KEYS = 150  # more than there is room for


def sized(keys):
    """The size of each key's value, the same for all processes."""
    return [SIZES[key[0] % len(SIZES)] for key in keys]


KEYS = [key_of(i) for i in range(NUM_KEYS)]


def write_for_ever(folder, seed, pipe):
    """Put random batches and tell the keys whose puts were acknowledged, a line each."""
    draw = random.Random(str(seed))
    with DiskStore(folder, LIMIT) as store:
        while True:
            keys = draw.sample(KEYS, draw.randint(1, 12))
            for key, kept in zip(keys, put(store, keys, sized(keys)), strict=True):
                if kept:
                    os.write(pipe, b"%d\n" % KEYS.index(key))


def forked(function, *arguments):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function(*arguments)
        os._exit(1)
    return child


def killed(child):
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "the writer had ended by itself"


def test_a_killed_writer_leaves_whole_values(tmp_path):
    """Killed after some acknowledged values, at any point of a later put."""
    seed = secrets.randbelow(2**32)
    print("seed", seed)
    draw = random.Random(str(seed))
    acknowledged = 0
    for turn in range(25):
        read_end, write_end = os.pipe()
        child = forked(write_for_ever, tmp_path / "store", (seed, turn), write_end)
        os.close(write_end)
        lines = os.fdopen(read_end, "rb")
        last = [int(lines.readline()) for _ in range(draw.randint(1, 40))][-5:]
        killed(child)
        lines.close()
        store = DiskStore(tmp_path / "store", LIMIT)
        get(store, KEYS, sized(KEYS))  # proves that hits are right
        kept = get(store, [KEYS[i] for i in last], sized([KEYS[i] for i in last]))
        acknowledged += sum(kept)
        store.close()
    # Later puts may have evicted some of the last ones, not all of them.
    assert acknowledged > 25


def test_processes_share_a_folder_that_is_too_small(tmp_path):
    """Writers evict what others write and read at the same time."""
    seed = secrets.randbelow(2**32)
    print("seed", seed)
    store = DiskStore(tmp_path / "store", LIMIT)
    read_end, write_end = os.pipe()
    writers = [forked(write_for_ever, tmp_path / "store", (seed, i), write_end) for i in range(3)]
    os.close(write_end)
    lines = os.fdopen(read_end, "rb")
    hits = 0
    try:
        for _ in range(60):
            keys = [KEYS[int(lines.readline())] for _ in range(6)]
            hits += sum(get(store, keys, sized(keys)))
            put(store, keys, sized(keys))
    finally:
        for writer in writers:
            killed(writer)
        lines.close()
    assert hits > 60


def flip_bits(path, draw, count):
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(count):
            at = draw.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def damage_index(path, draw):
    """Write random bytes into the parts of the index that are in use."""
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        used = [i for i in range(4096, len(data)) if data[i]]
        for at in draw.sample(used, len(used) // 10):
            data[at] = draw.randrange(256)
        file.seek(4096)
        file.write(data[4096:])


@pytest.mark.parametrize("what", ["data", "index", "index at large"])
def test_damaged_files_give_misses(tmp_path, what):
    seed = secrets.randbelow(2**32)
    print("seed", seed)
    draw = random.Random(str(seed))
    keys = KEYS[:60]
    found = 0
    for turn in range(6):
        folder = tmp_path / str(turn)
        with DiskStore(folder, LIMIT) as store:
            assert all(put(store, keys, sized(keys)))
        if what == "data":
            flip_bits(folder / "data.bin", draw, 40)
        elif what == "index":
            damage_index(folder / "index.bin", draw)
        else:
            with open(folder / "index.bin", "r+b") as file:
                file.seek(4096)
                file.write(draw.randbytes((folder / "index.bin").stat().st_size - 4096))
        with DiskStore(folder, LIMIT) as store:
            hits = get(store, keys, sized(keys))
            found += sum(hits)
            if what == "data":
                assert not all(hits)
            assert get(store, keys, sized(keys)) == hits
            # It goes on: what was damaged is written again, and every hit is right.
            for _ in range(3):
                put(store, keys, sized(keys))
                again = get(store, keys, sized(keys))
            if what == "data":
                assert all(again)
    if what == "data":
        assert found > 60


def test_pairs_of_flips_show(tmp_path):
    """A sum of words would miss some pairs of the same high bit."""
    for word in (1, 7, 600, 4099, 12_000):
        folder = tmp_path / str(word)
        with DiskStore(folder, LIMIT) as store:
            assert put(store, KEYS[:1], [130_000]) == [True]
        with open(folder / "data.bin", "r+b") as file:
            for at in (7, 8 * word + 7):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x80]))
        with DiskStore(folder, LIMIT) as store:
            assert get(store, KEYS[:1], [130_000]) == [False]


def test_a_damaged_value_is_reported_and_removed(tmp_path, caplog):
    with DiskStore(tmp_path / "store", LIMIT) as store:
        assert put(store, KEYS[:1], [60_000]) == [True]
        with open(tmp_path / "store" / "data.bin", "r+b") as file:
            file.seek(30_000)
            file.write(b"damage")
        with caplog.at_level(logging.WARNING):
            assert get(store, KEYS[:1], [60_000]) == [False]
            assert store.exists(KEYS[:1]) == [False]
            assert get(store, KEYS[:1], [60_000]) == [False]
    assert [r.message.partition(": ")[2] for r in caplog.records] == [
        "1 values were damaged, and are removed"
    ]


def test_deleted_and_cut_files_are_misses(tmp_path):
    folder = tmp_path / "store"
    with DiskStore(folder, LIMIT) as store:
        assert all(put(store, KEYS[:20], sized(KEYS[:20])))
        os.truncate(folder / "data.bin", 200_000)
        hits = get(store, KEYS[:20], sized(KEYS[:20]))
        assert 1 <= sum(hits) <= 3
        put(store, KEYS[:20], sized(KEYS[:20]))
        get(store, KEYS[:20], sized(KEYS[:20]))
        os.truncate(folder / "index.bin", 5000)
        with pytest.raises(OSError, match="the file ends"):
            get(store, KEYS[:20], sized(KEYS[:20]))
    with DiskStore(tmp_path / "other", LIMIT) as store:
        assert all(put(store, KEYS[:20], sized(KEYS[:20])))
        for path in (tmp_path / "other").iterdir():
            path.unlink()
        assert all(get(store, KEYS[:20], sized(KEYS[:20])))  # its files are still open
        with DiskStore(tmp_path / "other", LIMIT) as new:
            assert not any(get(new, KEYS[:20], sized(KEYS[:20])))


def test_a_full_disk(tmp_path):
    """A limit of file sizes stands in for the end of the disk."""

    def full():
        keys = KEYS[:100]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        store = DiskStore(tmp_path / "store", LIMIT)
        for _ in range(3):
            for i in range(0, 100, 10):
                assert any(put(store, keys[i : i + 10], [60_000] * 10))
                assert any(get(store, keys[i : i + 10], [60_000] * 10))
        kept = get(store, keys, [60_000] * 100)
        assert 20 <= sum(kept) <= 32
        large = put(store, keys, [130_000] * 100)  # another size finds room too
        assert any(large)

    def no_room_for_the_index():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        with pytest.raises(OSError, match="no room for .* bytes: File too large.*index"):
            DiskStore(tmp_path / "other", LIMIT)

    assert not failures([("full", full)], seconds=60)
    assert not failures([("index", no_room_for_the_index)], seconds=60)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_reserves_nothing(tmp_path, monkeypatch, error):
    """With O_DIRECT, the writes of single bytes by which the C library reserves are refused."""

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with DiskStore(tmp_path / "store", LIMIT) as store:
        for i in range(0, NUM_KEYS, 10):
            keys = KEYS[i : i + 10]
            assert all(put(store, keys, sized(keys)))
            assert all(get(store, keys, sized(keys)))
        assert (tmp_path / "store" / "data.bin").stat().st_size <= LIMIT


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
