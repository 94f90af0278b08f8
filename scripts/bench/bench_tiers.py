# SPDX-License-Identifier: Apache-2.0
"""Throughput to and from the tiers below a cache, beside copies and plain files.

    python scripts/bench/bench_tiers.py --folder /var/tmp

In each round, the pages of a text are copied to host memory when its tokens are recorded, come
back from there when the pool has forgotten them, go to a folder, and come back from the folder when
host memory has forgotten them, too. Beside them, as many bytes are copied between two arrays page
by page, and go to a plain file and back past the page cache of the system. The cache has the shape
of a Llama, and kernels that do nothing: it is the tiers that are measured. What comes back is
compared with what went away. A first round, in which all memory is touched, does not count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tvm_ffi
from bench_transfer import append, make_cache

from tvm_pagedkv import KVCache, PrefixCacheConfig
from tvm_pagedkv.cache import open_prefix_cache

BATCH = 32 << 20  # bytes that are written before waiting for the disk: those of a job of a store
CHUNK = 1 << 20
FILE_THREADS = 4  # as a DiskStore has
WAIT_S = 600.0
# What is measured -> its limits, the fastest of which counts.
LIMITS = {
    "pool to host": ("copy, 1 thread", "copy, all threads"),
    "host to pool": ("copy, 1 thread", "copy, all threads"),
    "pool to disk": ("file, written",),
    "disk to pool": ("file, read",),
}


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Texts:
    """Texts in a cache that has tiers, one after the other.

    Parameters
    ----------
    options : argparse.Namespace
    folder : Path, optional
        For the pages on disk; without it, the cache has host memory only.

    Raises
    ------
    RuntimeError
        If a tier does not give back what it got.
    """

    def __init__(self, options: argparse.Namespace, folder: Path | None = None):
        self.options = options
        self.cache: KVCache = make_cache(options, is_sender=True)
        groups = self.cache.stats()["groups"]
        page_bytes = sum(group["num_layers"] * group["page_bytes"] for group in groups)
        self.num_pages = options.tokens // options.page_size
        self.num_bytes = self.num_pages * page_bytes
        self.seed = 0  # of the text
        pages_of = tvm_ffi.get_global_func("pagedkv.pages_of")
        layers = range(options.layers)
        self.pools = [np.from_dlpack(pages_of(self.cache, layer)) for layer in layers]
        disk_bytes = 4 * self.num_bytes + (64 << 20)
        disk = {} if folder is None else {"disk_path": folder, "disk_bytes": disk_bytes}
        host_bytes = self.num_bytes * 9 // 8 + (64 << 20)
        tiers = {"host_bytes": host_bytes, "model_id": "m", "write_policy": "through", **disk}
        config = PrefixCacheConfig(**tiers)
        open_prefix_cache(self.cache, config)

    def tokens(self) -> list[int]:
        rng = np.random.default_rng(self.seed)
        return rng.integers(1 << 15, size=self.options.tokens).tolist()

    def rows(self) -> Iterator[np.ndarray]:
        """The pages of the text in each layer."""
        rng = np.random.default_rng(self.seed)
        for pool in self.pools:
            shape = (self.num_pages, *pool.shape[1:])
            yield rng.random(shape, np.float32).astype(pool.dtype)

    def leave(self) -> float:
        """Return the seconds in which the lower tiers take all pages of the next text."""
        cache = self.cache
        self.seed += 1
        tokens = self.tokens()
        cache.add_sequence(0)
        append(cache, self.options, self.options.tokens)
        for pool, rows in zip(self.pools, self.rows(), strict=True):
            pool[cache.page_table(0)] = rows

        def record() -> None:
            cache.record_tokens(0, tokens)
            if not cache.flush_prefixes(WAIT_S):
                raise RuntimeError("the folder did not take the pages in time")

        seconds = seconds_of(record)
        cache.remove_sequence(0)
        return seconds

    def come_back(self) -> float:
        """Return the seconds of the lookup that brings all pages back from below the pool."""
        cache, wanted = self.cache, self.num_pages * self.options.page_size
        tokens = [*self.tokens(), 0]
        in_pool = cache.stats()["prefix_tiers"]["reused_pool_tokens"]
        start = time.perf_counter()
        num_found = cache.add_sequence(1, tokens, lookup_timeout=WAIT_S)
        seconds = time.perf_counter() - start
        in_pool = cache.stats()["prefix_tiers"]["reused_pool_tokens"] - in_pool
        is_right = all(
            np.array_equal(pool[cache.page_table(1)], rows)
            for pool, rows in zip(self.pools, self.rows(), strict=True)
        )
        cache.remove_sequence(1)
        if num_found - in_pool != wanted:
            raise RuntimeError(f"{num_found - in_pool} of {wanted} tokens came from lower tiers")
        if not is_right:
            raise RuntimeError("other rows came back")
        return seconds


class Copies:
    """Copies of pages between two arrays, by one thread or by all."""

    def __init__(self, num_pages: int, page_bytes: int, num_threads: int):
        self.source = np.ones((num_pages, page_bytes), np.uint8)
        self.target = np.ones((num_pages, page_bytes), np.uint8)
        self.parts = np.array_split(np.arange(num_pages), num_threads)
        self.threads = ThreadPoolExecutor(num_threads)

    def copy(self, pages: np.ndarray) -> None:
        for page in pages:
            np.copyto(self.target[page], self.source[page])

    def one(self) -> float:
        return seconds_of(lambda: self.copy(np.arange(len(self.source))))

    def all(self) -> float:
        return seconds_of(lambda: list(self.threads.map(self.copy, self.parts)))


class PlainFile:
    """A file that is written and read past the page cache of the system, by a few threads."""

    def __init__(self, path: Path, num_bytes: int):
        self.path = path
        self.num_bytes = num_bytes // CHUNK * CHUNK
        self.memory = memoryview(mmap.mmap(-1, self.num_bytes))
        np.frombuffer(self.memory, np.uint8)[...] = 1
        self.threads = ThreadPoolExecutor(FILE_THREADS)

    def _each(self, call: Callable[[int, list[memoryview], int], int], begin: int) -> None:
        """Transfer a batch."""
        starts = range(begin, min(begin + BATCH, self.num_bytes), CHUNK)

        def transfer(start: int) -> None:
            if call(self.descriptor, [self.memory[start : start + CHUNK]], start) != CHUNK:
                raise OSError("a short read or write")

        list(self.threads.map(transfer, starts))

    def _open(self, flags: int) -> None:
        self.descriptor = os.open(self.path, flags | os.O_DIRECT, 0o600)

    def write(self) -> float:
        """Return the seconds to write it anew, and wait for the disk after each batch."""
        self._open(os.O_CREAT | os.O_RDWR)

        def write() -> None:
            for begin in range(0, self.num_bytes, BATCH):
                self._each(os.pwritev, begin)
                os.fdatasync(self.descriptor)

        seconds = seconds_of(write)
        os.close(self.descriptor)
        return seconds

    def read(self) -> float:
        """Return the seconds to read it, and remove it."""
        self._open(os.O_RDONLY)

        def read() -> None:
            for begin in range(0, self.num_bytes, BATCH):
                self._each(os.preadv, begin)

        seconds = seconds_of(read)
        os.close(self.descriptor)
        self.path.unlink()
        return seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return GB/s of each round."""
    in_memory, on_disk = Texts(options), Texts(options, folder / "pages")
    page_bytes = in_memory.num_bytes // in_memory.num_pages
    copies = Copies(in_memory.num_pages, page_bytes, options.threads)
    file = PlainFile(folder / "file", in_memory.num_bytes)
    speeds: dict[str, list[float]] = {}

    def add(name: str, num_bytes: int, seconds: float) -> None:
        speeds.setdefault(name, []).append(num_bytes / seconds / 1e9)

    for number in range(options.rounds + 1):
        num_bytes = in_memory.num_bytes
        add("copy, 1 thread", num_bytes, copies.one())
        add("copy, all threads", num_bytes, copies.all())
        add("pool to host", num_bytes, in_memory.leave())
        in_memory.cache.clear()
        add("host to pool", num_bytes, in_memory.come_back())
        in_memory.cache.forget_prefixes()
        add("file, written", file.num_bytes, file.write())
        add("file, read", file.num_bytes, file.read())
        add("pool to disk", num_bytes, on_disk.leave())
        on_disk.cache.forget_prefixes()
        add("disk to pool", num_bytes, on_disk.come_back())
        on_disk.cache.forget_prefixes()
        print(f"round {number} of {options.rounds}", flush=True)
    on_disk.cache.close_prefixes(WAIT_S)
    return {name: figures[1:] for name, figures in speeds.items()}


def share_of(name: str, speeds: dict[str, list[float]]) -> float:
    """The median over rounds of the share of the fastest limit."""
    limits = zip(*(speeds[limit] for limit in LIMITS[name]), strict=True)
    return statistics.median(
        speed / max(limit) for speed, limit in zip(speeds[name], limits, strict=True)
    )


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=8192)
    add("--page-size", type=int, default=16)
    add("--layers", type=int, default=16)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=os.cpu_count())
    add("--folder", type=Path, help="where to keep pages on disk (default: a temporary folder)")
    add("--json", type=Path, help="write all figures")
    options = parser.parse_args(arguments)
    options.qo_heads = options.kv_heads
    return options


def main() -> None:
    options = options_of()
    folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=options.folder))
    try:
        speeds = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{'':20} {'GB/s':>6}  of the limit")
    for name, all_speeds in speeds.items():
        share = f"{share_of(name, speeds):13.0%}" if name in LIMITS else ""
        print(f"{name:20} {statistics.median(all_speeds):6.2f} {share}")
    if options.json:
        options.json.write_text(json.dumps({"gb_s": speeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
