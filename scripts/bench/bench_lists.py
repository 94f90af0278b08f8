#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen positions and blocks beside dense attention, over one long sequence.

A layer of K and V in bfloat16, and an index lane. Rows choose positions by the lane, and attend to
them; then as many positions in blocks, each index head for some KV heads; then, in a decode step,
as many in the pages with the largest bounds. The keys are random, so the lists of two rows have
little in common: lists of a model overlap, and read more from the caches of the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
STEP = 2048  # rows of a step that fills the cache
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Shape:
    """What is measured: index heads and their width, positions in all, and how many are chosen.

    `block` is the number of positions of a block.
    """

    heads: int
    dim: int
    positions: int
    chosen: int
    block: int


def _cache(shape: Shape, index_dtype: str):
    import tvm_pagedkv as pkv

    lane = pkv.LayerSpec(
        "index", num_qo_heads=shape.heads, qk_head_dim=shape.dim, kv_dtype=index_dtype
    )
    config = pkv.KVCacheConfig(
        num_layers=2,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qk_head_dim=HEAD_DIM,
        dtype=DTYPE,
        max_total_tokens=shape.positions + STEP,
        max_num_sequences=1,
        prefill_chunk_size=STEP,
        rope=pkv.RopeConfig(mode="none"),
        layers=[pkv.LayerSpec(lists=True, page_bounds=True), lane],
    )
    cache = pkv.create(config)
    cache.add_sequence(0)
    return cache


class Rows:
    """Arguments of a step of `count` random rows."""

    def __init__(self, shape: Shape, count: int, rng):
        import tvm

        def normal(*extents, dtype=DTYPE):
            numbers = rng.standard_normal((count, *extents), dtype=np.float32)
            return tvm.runtime.tensor(numbers.astype(dtype))

        self.count = count
        self.qkv = normal(HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.keys = normal(shape.dim)
        self.q = normal(shape.heads, shape.dim)
        self.weights = normal(shape.heads, dtype="float32")
        self.nothing = tvm.runtime.tensor(np.full((count, 1), -1, np.int32))

    def append(self, cache) -> None:
        """Append them, and attend to nothing."""
        with cache.forward([0], [self.count]):
            cache.attention(0, self.qkv, positions=self.nothing)
            cache.append_index(1, self.keys)


def _seconds(run: Callable, budget: float) -> float:
    """Return the shortest time of a call."""
    times, end = [], time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(cache, rows: Rows, shape: Shape, budget: float) -> None:
    """Print a line for a step of some rows, which the cache does not keep."""
    cache.begin_forward([0], [rows.count])
    cache.append_index(1, rows.keys)
    positions = cache.index_top_k(1, rows.q, rows.weights, shape.chosen)
    num_blocks, size = shape.chosen // shape.block, shape.block
    steps = {
        "dense": lambda: cache.attention(0, rows.qkv),
        "index": lambda: cache.index_top_k(1, rows.q, rows.weights, shape.chosen),
        "lists": lambda: cache.attention(0, rows.qkv, positions=positions),
    }
    if KV_HEADS % shape.heads == 0:
        blocks = cache.index_top_blocks(1, rows.q, num_blocks, size)
        steps |= {
            "index of blocks": lambda: cache.index_top_blocks(1, rows.q, num_blocks, size),
            "blocks": lambda: cache.attention(0, rows.qkv, blocks=blocks, block_size=size),
        }
    if rows.count == 1:
        steps["budget"] = lambda: cache.attention(0, rows.qkv, budget=shape.chosen)
    taken = {name: _seconds(run, budget) * 1e3 for name, run in steps.items()}
    cache.abort_forward()
    both = taken["index"] + taken["lists"]
    print(
        f"{rows.count:5} rows: "
        + ", ".join(f"{name} {each:.2f} ms" for name, each in taken.items())
        + f", {taken['dense'] / both:.1f} times faster with the choice, "
        f"{taken['dense'] / taken['lists']:.1f} without it",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=65536)
    parser.add_argument("--chosen", type=int, default=2048)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--index-heads", type=int, nargs="+", default=[4])
    parser.add_argument("--index-dim", type=int, default=128)
    parser.add_argument("--index-dtype", default=DTYPE, help="type of the keys' pages")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--budget", type=float, default=1, help="seconds per measurement")
    arguments = parser.parse_args()
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for heads in arguments.index_heads:
        shape = Shape(
            heads, arguments.index_dim, arguments.positions, arguments.chosen, arguments.block
        )
        rng, cache = np.random.default_rng(0), _cache(shape, arguments.index_dtype)
        filling, kept = Rows(shape, STEP, rng), shape.positions - max(arguments.rows)
        for _ in range(kept // STEP):
            filling.append(cache)
        if kept % STEP:
            Rows(shape, kept % STEP, rng).append(cache)
        print(
            f"{os.environ['TVM_NUM_THREADS']} threads, {kept} positions before the rows, "
            f"{shape.chosen} chosen by {heads} index heads of {shape.dim}, keys in "
            f"{arguments.index_dtype}"
        )
        for count in arguments.rows:
            measure(cache, Rows(shape, count, rng), shape, arguments.budget)


if __name__ == "__main__":
    main()
