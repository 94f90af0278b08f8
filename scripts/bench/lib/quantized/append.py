# SPDX-License-Identifier: Apache-2.0
"""Throughput of kernels that append and quantize rows, beside a copy of as many bytes."""

from __future__ import annotations

import statistics

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from bench_pages import median_seconds

from lib.cases import DIM, HEADS, KV_HEADS, PAGE, itemsize
from lib.streams import Streams

ROUNDS = 3
KERNELS = ("rope_append", "transpose_append")


def _arguments(dtype: str, kv_dtype: str, num_rows: int) -> tuple[dict[str, tuple], dict[str, int]]:
    """The arguments of each kernel, and the bytes that it reads and writes."""
    import tvm

    from tir_kernels.codec import codec_of

    rng = np.random.default_rng(0)

    def tensor(*shape):
        return tvm.runtime.tensor(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def integers(values):
        return tvm.runtime.tensor(np.asarray(values, np.int32))

    num_pages = 2 * -(-num_rows // PAGE)
    codec = codec_of(kv_dtype)
    if codec is not None:
        size = codec.page_bytes(2 * KV_HEADS * PAGE, DIM, DIM)
        pages = tvm.runtime.tensor(np.zeros((num_pages, size), np.uint8))
        rows = [each.row_bytes(DIM) + each.scale_bytes(DIM, DIM) for each in (codec.k, codec.v)]
        row_bytes = sum(rows) // 2
    else:
        pages = tvm.runtime.tensor(np.zeros((num_pages, 2, KV_HEADS, PAGE, DIM), kv_dtype))
        row_bytes = DIM * itemsize(kv_dtype)
    page_ids = rng.permutation(num_pages)
    slots = (page_ids[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:num_rows]
    qkv, q = tensor(num_rows, HEADS + 2 * KV_HEADS, DIM), tensor(num_rows, HEADS, DIM)
    k, v = tensor(num_rows, KV_HEADS, DIM), tensor(num_rows, KV_HEADS, DIM)
    positions = integers(np.arange(num_rows))
    arguments = {
        "rope_append": (qkv, integers([0, num_rows]), positions, integers(slots), q, pages, 1),
        "transpose_append": (pages, k, v, integers(slots)),
    }
    of_rows = num_rows * 2 * KV_HEADS * (DIM * itemsize(dtype) + row_bytes)
    of_queries = num_rows * 2 * HEADS * DIM * itemsize(dtype)
    return arguments, {"rope_append": of_rows + of_queries, "transpose_append": of_rows}


def append_records(
    dtypes: list[str], kv_dtypes: list[str], all_rows: list[int], budget: float
) -> list[dict]:
    """Time the kernels, and the fastest of the loops that copy as many bytes, alternating.

    `kv_dtypes` may name codecs and types of numbers; None is that of the rows.
    """
    from tir_kernels.cpu.worker import SERIAL_BELOW_BYTES
    from tvm_pagedkv.compiler.build import build_kernels
    from tvm_pagedkv.config import KVCacheConfig

    streams, records = Streams(), []
    for dtype in dtypes:
        for kv_dtype in (name or dtype for name in kv_dtypes):
            config = KVCacheConfig(
                1, HEADS, KV_HEADS, DIM, dtype=dtype, kv_dtype=kv_dtype, page_size=PAGE
            )
            kernels = dict(build_kernels(config).kernels)
            for num_rows in all_rows:
                arguments, num_bytes = _arguments(dtype, kv_dtype, num_rows)
                for name in KERNELS:
                    moved = num_bytes[name]
                    loops = streams.runs("copy", moved, moved < SERIAL_BELOW_BYTES)

                    def run(kernel=kernels[name], arguments=arguments[name]):
                        kernel(*arguments)

                    rounds = []
                    for _ in range(ROUNDS):
                        seconds, *copies = median_seconds([run, *loops], budget / ROUNDS)
                        rounds.append((min(copies) / seconds, seconds, min(copies)))
                    share, seconds, copy = statistics.median_low(rounds)
                    shape = {"kernel": name, "dtype": dtype, "kv_dtype": kv_dtype, "rows": num_rows}
                    found = {"bytes": moved, "seconds": seconds, "copy_s": copy, "share": share}
                    records.append(shape | found | {"shares": [each[0] for each in rounds]})
    return records


def print_append_records(records: list[dict]) -> None:
    """A line per kernel, type, codec and number of rows."""
    print(
        f"\n{'append':17} {'rows of':9} {'pages of':14} {'rows':>5} {'us':>9} {'GB/s':>6} "
        f"{'copy':>6} {'of copy':>8} {'rounds':>15}"
    )
    for r in records:
        rate = r["bytes"] / 1e9
        rounds = " ".join(f"{share:.0%}" for share in r["shares"])
        print(
            f"{r['kernel']:17} {r['dtype']:9} {r['kv_dtype']:14} {r['rows']:5} "
            f"{r['seconds'] * 1e6:9.1f} {rate / r['seconds']:6.1f} {rate / r['copy_s']:6.1f} "
            f"{r['share']:8.0%} {rounds:>15}"
        )
