# SPDX-License-Identifier: Apache-2.0
"""Throughput of stores of pages, beside the disk or the network under them.

    python scripts/bench/bench_stores.py --folder /var/tmp
    python scripts/bench/bench_stores.py --valkey valkey://127.0.0.1:6379 --plot stores.png

Each round writes and reads the same bytes in the plainest way and then through each store: batches
of values to a new file, each followed by fdatasync, and 1 MiB at a time back. The page cache drops
the files before a cold read. Networks: a pair of processes over a TCP connection of loopback.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tvm_pagedkv.stores import DiskStore, MooncakeStore, PageStore, ValkeyStore

BATCH = 64
CHUNK = 1 << 20
DISK, NETWORK = "disk", "network"


class Values:
    """A batch of values in aligned memory, and the keys of all batches."""

    def __init__(self, value_bytes: int, total_bytes: int):
        self.value_bytes = value_bytes
        self.num_batches = max(1, total_bytes // (BATCH * value_bytes))
        self.memory = memoryview(mmap.mmap(-1, BATCH * value_bytes))
        array = np.frombuffer(self.memory, np.uint8)
        array[...] = np.frombuffer(np.random.default_rng(0).bytes(len(array)), np.uint8)
        self.addresses = [array.ctypes.data + i * value_bytes for i in range(BATCH)]
        self.sizes = [value_bytes] * BATCH
        self.keys = [[os.urandom(32) for _ in range(BATCH)] for _ in range(self.num_batches)]

    @property
    def total_bytes(self) -> int:
        return self.num_batches * len(self.memory)


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def drop_cached(path: Path) -> None:
    """Have the page cache forget the files below a path."""
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_file(path: Path, values: Values) -> None:
    with open(path, "wb", buffering=0) as file:
        for _ in range(values.num_batches):
            for start in range(0, len(values.memory), CHUNK):
                file.write(values.memory[start : start + CHUNK])
            os.fdatasync(file.fileno())


def read_file(path: Path, values: Values) -> None:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while count := file.readinto(values.memory[at : at + CHUNK]):
            at = (at + count) % len(values.memory)


def disk_turn(folder: Path, values: Values) -> Iterator[tuple[str, str, float]]:
    """Yield seconds of the plain file and of a `DiskStore`: (peer, operation, seconds)."""
    file = folder / "file"
    yield "file", "put", seconds_of(lambda: write_file(file, values))
    drop_cached(file)
    yield "file", "cold", seconds_of(lambda: read_file(file, values))
    yield "file", "warm", seconds_of(lambda: read_file(file, values))
    file.unlink()
    path = folder / "store"
    with DiskStore(path, 2 * values.total_bytes) as store:
        yield "DiskStore", "put", seconds_of(lambda: put_all(store, values))
        drop_cached(path)
        yield "DiskStore", "cold", seconds_of(lambda: get_all(store, values))
        yield "DiskStore", "warm", seconds_of(lambda: get_all(store, values))
    shutil.rmtree(path)


def put_all(store: PageStore, values: Values) -> None:
    for keys in values.keys:
        kept = store.put_from(keys, values.addresses, values.sizes)
        if not all(kept):
            raise SystemExit(f"{type(store).__name__} refused {kept.count(False)} values")


def get_all(store: PageStore, values: Values) -> None:
    for keys in values.keys:
        hits = store.get_into(keys, values.addresses, values.sizes)
        if not all(hits):
            raise SystemExit(f"{type(store).__name__} lost {hits.count(False)} values")


def loopback(values: Values) -> float:
    """Seconds in which another process sends the bytes over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if (child := os.fork()) == 0:
            with socket.create_connection(server.getsockname()) as sender:
                for _ in range(values.num_batches):
                    sender.sendall(values.memory)
            os._exit(0)
        connection, _ = server.accept()
    received = memoryview(bytearray(CHUNK))
    with connection:
        seconds = seconds_of(lambda: _drain(connection, received))
    os.waitpid(child, 0)
    return seconds


def _drain(connection: socket.socket, received: memoryview) -> None:
    while connection.recv_into(received):
        pass


def network_turn(stores: dict[str, PageStore], values: Values) -> Iterator[tuple[str, str, float]]:
    seconds = loopback(values)
    yield "loopback", "put", seconds
    yield "loopback", "warm", seconds
    for name, store in stores.items():
        yield name, "put", seconds_of(lambda store=store: put_all(store, values))
        yield name, "warm", seconds_of(lambda store=store: get_all(store, values))


def measure(options: argparse.Namespace, stores: dict[str, PageStore]) -> list[dict]:
    """Return a record for each store, size and operation."""
    records = []
    for kib in options.kib:
        rounds: dict[tuple[str, str, str], list[float]] = {}
        values = Values(kib << 10, options.mib << 20)
        for store in stores.values():
            store.register(values.addresses[0], len(values.memory))
        for _ in range(options.rounds):
            values.keys = Values(kib << 10, options.mib << 20).keys
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                for peer, operation, seconds in disk_turn(Path(folder), values):
                    rounds.setdefault((DISK, peer, operation), []).append(seconds)
            if stores:
                for peer, operation, seconds in network_turn(stores, values):
                    rounds.setdefault((NETWORK, peer, operation), []).append(seconds)
        for (medium, peer, operation), seconds in rounds.items():
            under = rounds[medium, "file" if medium == DISK else "loopback", operation]
            middle = statistics.median(seconds)
            records.append(
                {
                    "medium": medium,
                    "peer": peer,
                    "operation": operation,
                    "value_bytes": kib << 10,
                    "gb_per_s": values.total_bytes / middle / 1e9,
                    "share": statistics.median(under) / middle,
                    "turns_s": seconds,
                }
            )
    return records


def report(records: list[dict]) -> None:
    print(f"{'':20}{'KiB':>6}{'put':>14}{'get cold':>14}{'get warm':>14}   GB/s (share)")
    for size in dict.fromkeys(r["value_bytes"] for r in records):
        for peer in dict.fromkeys(r["peer"] for r in records):
            found = {
                r["operation"]: f"{r['gb_per_s']:.2f} ({r['share']:.2f})"
                for r in records
                if (r["peer"], r["value_bytes"]) == (peer, size)
            }
            cells = "".join(f"{found.get(name, '-'):>14}" for name in ("put", "cold", "warm"))
            print(f"{peer:20}{size >> 10:6}{cells}")


def draw(records: list[dict], path: str) -> None:
    """Draw GB/s over the size of values, a panel for each operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    peers = list(dict.fromkeys(r["peer"] for r in records))
    titles = {"put": "put, on disk", "cold": "get, cold", "warm": "get again"}
    for axis, (operation, title) in zip(axes, titles.items(), strict=True):
        for peer in peers:
            own = [r for r in records if (r["peer"], r["operation"]) == (peer, operation)]
            style = "--" if peer in ("file", "loopback") else "-"
            sizes = [r["value_bytes"] >> 10 for r in own]
            speeds = [r["gb_per_s"] for r in own]
            axis.plot(sizes, speeds, style, marker="o", color=f"C{peers.index(peer)}", label=peer)
        axis.set(title=title, xlabel="KiB of a value", xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both", linewidth=0.4)
    axes[0].set(ylabel="GB/s")
    handles = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
    figure.tight_layout(rect=(0, 0, 0.88, 1))
    figure.legend(handles.values(), handles, loc="center right", frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", help="where the disk is written; the default for temporary files"
    )
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 1024], help="of a value")
    parser.add_argument("--mib", type=int, default=512, help="written and read in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--valkey", metavar="URL", help="measure this server too")
    parser.add_argument("--mooncake", metavar="HOST:PORT", help="measure the store of this master")
    parser.add_argument("--json", metavar="FILE", help="write all records")
    parser.add_argument("--plot", metavar="FILE", help="draw GB/s over the size of values")
    options = parser.parse_args()
    stores: dict[str, PageStore] = {}
    if options.valkey:
        stores["ValkeyStore"] = ValkeyStore(options.valkey)
    if options.mooncake:
        stores["MooncakeStore"] = MooncakeStore(options.mooncake)
    records = measure(options, stores)
    for store in stores.values():
        store.close()
    report(records)
    if options.json:
        Path(options.json).write_text(json.dumps({"records": records}, indent=1))
    if options.plot:
        draw(records, options.plot)


if __name__ == "__main__":
    main()
