# SPDX-License-Identifier: Apache-2.0
"""Run many steps with forks, pops and removals between them, and watch the memory.

Kernels that do nothing stand in, so that only the runtime object is at work. Ends with status 1
when the process grows after it has warmed up, or when the state is broken. Each line has the bytes
that malloc has handed out, the blocks that Python has, and the memory in RAM: if only the last one
grows, it is free memory that malloc keeps.

    python scripts/tools/soak.py                    # a million steps: some minutes
    python scripts/tools/soak.py --steps 20000
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time
from collections.abc import Callable

import numpy as np
import tvm

import tvm_pagedkv as pkv

PAGE_SIZE, NUM_PAGES, MAX_SEQUENCES, CHUNK = 4, 512, 24, 32
WINDOW = 24
KERNELS = (
    "rope_append", "prefill", "decode", "prefill_sliding", "decode_sliding", "copy_single_page",
    "merge", "transpose_append_mla", "mla_prefill", "prefill_ragged",
)  # fmt: skip
MHA = {"kind": "mha", "num_qo_heads": 2, "num_kv_heads": 1, "qk_head_dim": 8}
LAYERS = (
    MHA,
    {**MHA, "kind": "mha_sliding", "window": WINDOW},
    {"kind": "mla", "num_qo_heads": 2, "qk_head_dim": 16, "v_head_dim": 8},
)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")
        + ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def malloc_bytes() -> int | None:
    """Bytes that malloc has handed out; None where the C library does not tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class Soak:
    """A cache in use, at random."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        config = {
            "max_num_sequences": MAX_SEQUENCES,
            "max_total_tokens": NUM_PAGES * PAGE_SIZE,
            "prefill_chunk_size": CHUNK,
            "page_size": PAGE_SIZE,
            "dtype": "float32",
            "rope_mode": 1,
            "layers": LAYERS,
        }
        nothing = tvm.runtime.convert(lambda *_: None)
        create = tvm.get_global_func("pagedkv.create")
        self.cache = create(config, dict.fromkeys(KERNELS, nothing), tvm.cpu())
        self.tensors = {
            rows: [
                tvm.runtime.tensor(np.zeros((rows, *shape), "float32"))
                for shape in ((4, 8), (2, 8), (16,))
            ]
            for rows in range(1, CHUNK + 1)
        }
        self.lengths: dict[int, int] = {}
        self.next_id = 0
        self.counts = dict.fromkeys(("full", "forks", "pops", "refused", "removed"), 0)

    def step(self) -> None:
        """Change the sequences a little, then append to some of them."""
        draw = self.random.random()
        if len(self.lengths) < 2 or (draw < 0.1 and len(self.lengths) < MAX_SEQUENCES):
            self._add()
        elif draw < 0.25 and len(self.lengths) < MAX_SEQUENCES:
            self._fork()
        elif draw < 0.35:
            self._pop()
        elif draw < 0.4 or len(self.lengths) == MAX_SEQUENCES:
            self._remove(self.random.choice(list(self.lengths)))
        self._forward()

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _add(self) -> None:
        seq_id = self._new_id()
        self.cache.add_sequence(seq_id)
        self.lengths[seq_id] = 0

    def _fork(self) -> None:
        parent, child = self.random.choice(list(self.lengths)), self._new_id()
        length = max(0, self.lengths[parent] - self.random.randrange(8))
        if self._is_taken(self.cache.fork_sequence, parent, child, length):
            self.lengths[child] = length
            self.counts["forks"] += 1

    def _pop(self) -> None:
        seq_id = self.random.choice(list(self.lengths))
        count = min(self.random.randrange(8), self.lengths[seq_id])
        if self._is_taken(self.cache.pop_n, seq_id, count):
            self.lengths[seq_id] -= count
            self.counts["pops"] += 1

    def _is_taken(self, function: Callable, *args: int) -> bool:
        """Layers with a window refuse to go back to where they no longer have what they see."""
        try:
            function(*args)
        except ValueError:
            self.counts["refused"] += 1
            return False
        return True

    def _remove(self, seq_id: int) -> None:
        self.cache.remove_sequence(seq_id)
        del self.lengths[seq_id]
        self.counts["removed"] += 1

    def _forward(self) -> None:
        batch = self.random.sample(list(self.lengths), self.random.randint(1, len(self.lengths)))
        appends = [1] * len(batch)
        if self.random.random() < 0.3:
            appends = [self.random.randint(1, CHUNK // len(batch)) for _ in batch]
        try:
            self.cache.begin_forward(batch, appends)
        except pkv.CacheFullError:
            self.counts["full"] += 1
            self._remove(max(self.lengths, key=self.lengths.__getitem__))
            return
        if self.random.random() < 0.25:
            qkv, out, latent = self.tensors[sum(appends)]
            for layer in range(2):
                self.cache.attention(layer, qkv, 1.0, out)
            self.cache.append_mla_kv(2, latent)
        self.cache.end_forward()
        for seq_id, count in zip(batch, appends, strict=True):
            self.lengths[seq_id] += count

    def check(self) -> None:
        """Compare what the cache says with what was done."""
        self.cache.check_integrity()
        lengths = {i: self.cache.sequence_length(i) for i in self.cache.sequence_ids()}
        if lengths != dict(sorted(self.lengths.items())):
            raise RuntimeError(f"the lengths are {lengths}, expected {self.lengths}")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=4.0, help="MiB by which it may grow (default 4)"
    )
    options = parser.parse_args()
    soak = Soak(options.seed)
    # By then all pages have been in use at least once.
    warm_up = max(options.steps // 5, min(20_000, options.steps // 2))
    every = max(1, options.steps // 20)
    begin, base, growth = time.perf_counter(), 0, 0.0
    for step in range(1, options.steps + 1):
        try:
            soak.step()
            if step % 200 == 0:
                soak.check()
        except Exception as error:
            print(f"step {step}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        if step == warm_up:
            base = resident_bytes()
        if step % every == 0:
            rss = resident_bytes()
            growth = (rss - base) / 2**20 if base else 0.0
            rate = step / (time.perf_counter() - begin)
            pages = soak.cache.stats()["num_used_pages"]
            counts = ", ".join(f"{count} {name}" for name, count in soak.counts.items())
            allocated = malloc_bytes()
            malloc = "unknown" if allocated is None else f"{allocated / 2**20:.3f} MiB"
            print(
                f"{step:>8} steps, {rate:.0f} a second; RSS {rss / 2**20:.2f} MiB ({growth:+.2f}), "
                f"malloc {malloc}, Python {sys.getallocatedblocks()} blocks; "
                f"{pages} pages; {counts}",
                flush=True,
            )
    soak.check()
    soak.cache.clear()
    soak.cache.check_integrity()
    print(f"{time.perf_counter() - begin:.1f} s; {growth:+.2f} MiB since step {warm_up}")
    return int(growth > options.limit)


if __name__ == "__main__":
    sys.exit(main())
