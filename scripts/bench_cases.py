# SPDX-License-Identifier: Apache-2.0
"""What bench_cpu.py measures, each peer in a process of its own.

TVM's workers spin after a launch and slow torch's threads down, hence the processes. Every process
reads 256 MiB before each timed run: a step of a model leaves none of the cache's pages in L3.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DTYPES = ("float32", "float16", "bfloat16")
FLUSH_BYTES = 2**28
BEGIN_FORWARD_CONTEXT = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Parameters
    ----------
    kind : {"prefill", "decode", "begin_forward"}
    batch, rows, context : int
        Sequences; rows of the step and positions of K and V, for each of them.
    """

    kind: str
    batch: int
    rows: int
    context: int

    @property
    def label(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.rows} on {self.context - self.rows}"
        return f"{self.kind} B={self.batch}" + (
            f" ctx {self.context}" if self.kind == "decode" else ""
        )

    def num_bytes(self, dtype: str) -> int:
        """Bytes of K and V."""
        return self.batch * self.context * 2 * KV_HEADS * DIM * (4 if dtype == "float32" else 2)

    @property
    def flops(self) -> int:
        """Of the two products, over what the causal mask leaves."""
        past = self.context - self.rows
        seen = self.rows * past + self.rows * (self.rows + 1) // 2
        return 4 * HEADS * DIM * self.batch * seen


KERNEL_CASES = (
    Case("prefill", 1, 512, 512),
    Case("prefill", 1, 512, 2560),
    Case("decode", 1, 1, 2048),
    Case("decode", 1, 1, 8192),
    Case("decode", 8, 1, 1024),
)
BEGIN_CASES = tuple(Case("begin_forward", batch, 1, 0) for batch in (1, 8, 64, 256))


def seconds_of(run: Callable, before: Callable, budget: float) -> list[float]:
    """Times of `run`, each after `before`: as many as fit the budget, at most 2000.

    At least three, where one takes less than a second.
    """
    run()
    times, end = [], time.perf_counter() + budget
    while not times or (len(times) < 3 and times[0] < 1) or time.perf_counter() < end:
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if len(times) == 2000:
            break
    return times


def emit(peer: str, dtype: str, case: Case | str, times: list[float]) -> None:
    """Print a measurement as one line of JSON, for the parent to read."""
    record = {"peer": peer, "dtype": dtype, "case": getattr(case, "label", case)}
    record |= {"median_s": statistics.median(times), "min_s": min(times), "n": len(times)}
    print(json.dumps(record), flush=True)


class PagedInputs:
    """Arguments of the kernels `prefill` and `decode` for a case."""

    def __init__(self, case: Case, dtype: str):
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
        import tvm

        rng = np.random.default_rng(0)
        num_pages = -(-case.context // PAGE)
        num_rows = case.batch * case.rows

        def floats(*shape):
            return tvm.runtime.tensor(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

        def integers(values):
            return tvm.runtime.tensor(np.asarray(values, np.int32))

        sequences = np.arange(case.batch + 1)
        q = floats(num_rows, HEADS, DIM)
        o = floats(num_rows, HEADS, DIM)
        lse = tvm.runtime.tensor(np.zeros((num_rows, HEADS), np.float32))
        table = (
            floats(case.batch * num_pages, 2, KV_HEADS, PAGE, DIM),
            integers(sequences * num_pages),
            integers(rng.permutation(case.batch * num_pages)),
            integers(np.full(case.batch, case.context - (num_pages - 1) * PAGE)),
            integers(np.zeros(case.batch)),
            integers(np.zeros(num_rows)),
        )
        tail = (0, 1.0, 1e4, DIM**-0.5)
        if case.kind == "decode":
            self.arguments = (q, *table, o, lse, *tail)
        else:
            self.arguments = (q, integers(sequences * case.rows), *table, o, lse, 1, *tail)


def measure_kernels(peer: str, dtype: str, budget: float) -> None:
    """Time our kernels or the stock ones, in turns with the machine's limits."""
    from tvm_pagedkv.limits import Limits

    limits = Limits()
    if peer == "ours":
        from tvm_pagedkv.build import build_kernels
        from tvm_pagedkv.config import KVCacheConfig

        kernels = build_kernels(KVCacheConfig(1, HEADS, KV_HEADS, DIM, dtype=dtype)).kernels
    else:
        from tests.stock import stock_kernels
        from tvm_pagedkv.build import resolve_target

        kernels = stock_kernels(HEADS, KV_HEADS, DIM, dtype, target=resolve_target())
    for case in KERNEL_CASES:
        run = functools.partial(kernels[case.kind], *PagedInputs(case, dtype).arguments)
        emit(peer, dtype, case, seconds_of(run, limits.read, budget))
    if peer == "ours":
        emit("limit", dtype, "read", limits.read_times)
        emit("limit", dtype, "fma", [limits.fma() for _ in range(10)])


def measure_torch(dtype: str, budget: float) -> None:
    """Time torch's scaled_dot_product_attention on dense K and V."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    attend = torch.nn.functional.scaled_dot_product_attention
    flush = torch.ones(FLUSH_BYTES // 4)
    for case in KERNEL_CASES:

        def dense(heads, length, batch=case.batch):
            return torch.randn(batch, heads, length, DIM).to(getattr(torch, dtype))

        q, k, v = (
            dense(HEADS, case.rows),
            dense(KV_HEADS, case.context),
            dense(KV_HEADS, case.context),
        )
        options = {"enable_gqa": True}
        if case.rows == case.context:
            options["is_causal"] = True
        elif case.rows > 1:
            seen = torch.ones(case.rows, case.context, dtype=torch.bool)
            options["attn_mask"] = seen.tril(case.context - case.rows)
        with torch.inference_mode():
            run = functools.partial(attend, q, k, v, **options)
            emit("torch", dtype, case, seconds_of(run, flush.sum, budget))


def measure_begin_forward(peer: str, budget: float) -> None:
    """Time ``begin_forward`` of one row for every sequence, as a decode step does."""
    import tvm
    from tvm_ffi import Shape

    from tests.stock import create_positional, stock_kernels
    from tvm_pagedkv import KVCacheConfig, build, use_stock_runtime

    config = KVCacheConfig(
        1, 1, 1, 8, max_num_sequences=256, max_total_tokens=2**19, prefill_chunk_size=2**14
    )
    if peer == "stock":
        use_stock_runtime()
        kernels, tag = stock_kernels(1, 1, 8, "float32"), "tirx"
    else:
        kernels, tag = build(config).kernels, "pagedkv"
    cache = create_positional(config, kernels, tag)
    prefix = "vm.builtin.kv_state_"
    clear, add, pop, begin, end = (
        tvm.get_global_func(prefix + name)
        for name in ("clear", "add_sequence", "popn", "begin_forward", "end_forward")
    )

    def undo(num_sequences: int) -> None:
        end(cache)
        for i in range(num_sequences):
            pop(cache, i, 1)

    for case in BEGIN_CASES:
        clear(cache)
        for i in range(case.batch):
            add(cache, i)
        ids, ones = Shape(range(case.batch)), Shape([1] * case.batch)
        begin(cache, ids, Shape([BEGIN_FORWARD_CONTEXT] * case.batch))
        end(cache)
        begin(cache, ids, ones)
        times, stop = [], time.perf_counter() + min(budget, 0.5)
        while time.perf_counter() < stop:
            undo(case.batch)
            start = time.perf_counter()
            begin(cache, ids, ones)
            times.append(time.perf_counter() - start)
        undo(case.batch)
        emit(peer, "", case, times)


def main() -> None:
    """``bench_cases.py PEER DTYPE BUDGET``; DTYPE "begin" is the host's part."""
    peer, dtype, budget = sys.argv[1], sys.argv[2], float(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if dtype == "begin":
        measure_begin_forward(peer, budget)
    elif peer == "torch":
        measure_torch(dtype, budget)
    else:
        measure_kernels(peer, dtype, budget)


if __name__ == "__main__":
    main()
