# SPDX-License-Identifier: Apache-2.0
"""Cases that the attention benchmarks measure, and their inputs: dense, and in shuffled pages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DTYPES = ("float32", "float16", "bfloat16")
FLUSH_BYTES = 2**28
_POOL = 1_000_003  # random numbers are drawn once and repeated: a prime, so that no two rows agree


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 4 if dtype == "float32" else 2


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, and the width of both."""

    query: int = HEADS
    kv: int = KV_HEADS
    dim: int = DIM

    @property
    def group(self) -> int:
        return self.query // self.kv

    @property
    def label(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.dim}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of a batch.

    Parameters
    ----------
    kind : {"prefill", "decode", "begin_forward"}
        Which of our kernels computes it; "begin_forward" is the host's part of a decode step.
    batch, rows, context : int
        Sequences; rows of the step and positions of K and V, for each of them.
    more : tuple of (batch, rows, context)
        Further sequences of the same step.
    """

    kind: str
    batch: int
    rows: int
    context: int
    more: tuple[tuple[int, int, int], ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(batch, rows, context) of sequences that are alike."""
        return ((self.batch, self.rows, self.context), *self.more)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Rows and positions of each sequence."""
        return [(rows, context) for batch, rows, context in self.parts for _ in range(batch)]

    def rows_and_contexts(self) -> tuple[np.ndarray, np.ndarray]:
        """`sequences` as two arrays, each in one piece."""
        rows, contexts = zip(*self.sequences, strict=True)
        return np.array(rows), np.array(contexts)

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.sequences)

    @property
    def num_positions(self) -> int:
        return sum(context for _, context in self.sequences)

    @property
    def label(self) -> str:
        if self.kind == "begin_forward":
            return f"begin_forward B={self.batch}"
        return f"{'mixed' if self.rows > 1 and self.more else self.kind} " + " + ".join(
            f"{rows} on {context - rows}" if rows > 1 else f"{batch} x {context}"
            for batch, rows, context in self.parts
        )

    def num_bytes(self, dtype: str, heads: Heads) -> int:
        """Bytes that have to be moved: K and V and the queries in, the outputs out."""
        vectors = 2 * heads.kv * self.num_positions + 2 * heads.query * self.num_rows
        return vectors * heads.dim * itemsize(dtype)

    def flops(self, heads: Heads) -> int:
        """Return the operations of the two products, over what the causal mask leaves."""
        seen = sum(
            rows * (context - rows) + rows * (rows + 1) // 2 for rows, context in self.sequences
        )
        return 4 * heads.query * heads.dim * seen


@functools.cache
def _pool(dtype: str, seed: int) -> np.ndarray:
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

    return np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32).astype(dtype)


def random_values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normally distributed values, some of them the same ones."""
    return np.resize(_pool(dtype, seed), shape)


def bits(values: np.ndarray) -> np.ndarray:
    """The same memory as integers, which NumPy copies faster than bfloat16."""
    return values.view({4: np.uint32, 2: np.uint16}[values.itemsize])


class Inputs:
    """Queries, K and V of a case, the sequences after one another.

    Attributes
    ----------
    q : [num_rows, query heads, dim]
    k, v : [num_positions, KV heads, dim]
    """

    def __init__(self, case: Case, dtype: str, heads: Heads):
        self.case, self.heads = case, heads
        self.q = random_values((case.num_rows, heads.query, heads.dim), dtype, 0)
        shape = (case.num_positions, heads.kv, heads.dim)
        self.k, self.v = (random_values(shape, dtype, seed) for seed in (1, 2))

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return q [batch, rows, ...], k and v [batch, context, ...] of equal sequences."""
        row = position = 0
        for batch, rows, context in self.case.parts:
            end_row, end = row + batch * rows, position + batch * context
            q = self.q[row:end_row].reshape(batch, rows, *self.q.shape[1:])
            k, v = (x[position:end].reshape(batch, context, *x.shape[1:]) for x in (self.k, self.v))
            yield q, k, v
            row, position = end_row, end

    def error(self, output: np.ndarray) -> float:
        """Largest error of some elements of an output, as a share of the largest one of these.

        First and last row of the first and last sequence of each part, for two heads.
        """
        expected, got, row = [], [], 0
        for q, k, v in self.parts():
            batch, rows, context = *q.shape[:2], k.shape[1]
            for i, r, head in itertools.product({0, batch - 1}, {0, rows - 1}, (0, -1)):
                seen = context - rows + r + 1
                logits = k[i, :seen, head].astype(np.float64) @ q[i, r, head].astype(np.float64)
                weights = np.exp((logits - logits.max()) * self.heads.dim**-0.5)
                values = v[i, :seen, head].astype(np.float64)
                expected.append(weights @ values / weights.sum())
                got.append(output[row + i * rows + r, head].astype(np.float64))
            row += batch * rows
        return float(np.abs(np.array(got) - expected).max() / np.abs(expected).max())


class PagedInputs:
    """Arguments of the kernels `prefill` and `decode` for a case.

    Its pages are in random order, and in memory where those of a cache would be: on huge pages.
    With a codec they are quantized.
    """

    def __init__(
        self,
        case: Case,
        dtype: str,
        heads: Heads | None = None,
        inputs: Inputs | None = None,
        codec=None,
    ):
        import tvm

        from tvm_pagedkv.measure import huge_zeros

        heads = heads or Heads()
        inputs = inputs or Inputs(case, dtype, heads)

        def integers(values):
            return tvm.runtime.tensor(np.asarray(values, np.int32))

        rows, contexts = case.rows_and_contexts()
        num_pages = -(-contexts // PAGE)
        page_indptr, row_indptr = (np.concatenate([[0], np.cumsum(n)]) for n in (num_pages, rows))
        page_ids = np.random.default_rng(0).permutation(page_indptr[-1])
        if codec is None:
            shape = (int(page_indptr[-1]), 2, heads.kv, PAGE, heads.dim)
            pages, page_tensor = huge_zeros(shape, dtype)
            write = _write_rows
        else:
            size = codec.page_bytes(2 * heads.kv * PAGE, heads.dim, heads.dim)
            pages, page_tensor = huge_zeros((int(page_indptr[-1]), size), "uint8")
            write = functools.partial(_write_codes, codec)
        position = 0
        for i, context in enumerate(contexts):
            ids = page_ids[page_indptr[i] : page_indptr[i + 1]]
            for plane, values in enumerate((inputs.k, inputs.v)):
                write(pages, ids, plane, values[position : position + context])
            position += context
        self.num_bytes = pages.nbytes + 2 * inputs.q.nbytes
        self.output = tvm.runtime.tensor(np.zeros_like(inputs.q))
        lse = tvm.runtime.tensor(np.zeros(inputs.q.shape[:2], np.float32))
        q = tvm.runtime.tensor(inputs.q)
        table = (
            page_tensor,
            integers(page_indptr),
            integers(page_ids),
            integers(contexts - (num_pages - 1) * PAGE),
            integers(np.zeros(len(rows))),
            integers(np.zeros(case.num_rows)),
        )
        tail = (0, 1.0, 1e4, heads.dim**-0.5)
        if case.kind == "decode":
            self.arguments = (q, *table, self.output, lse, *tail)
        else:
            self.arguments = (q, integers(row_indptr), *table, self.output, lse, 1, *tail)


def _in_pages(rows: np.ndarray, num_pages: int) -> np.ndarray:
    """Rows ``[n, heads, width]`` as ``[pages, heads, PAGE, width]``, with zeros behind them."""
    rows = np.pad(rows, ((0, num_pages * PAGE - len(rows)), (0, 0), (0, 0)))
    return rows.reshape(num_pages, PAGE, *rows.shape[1:]).swapaxes(1, 2)


def _write_rows(pages: np.ndarray, ids: np.ndarray, plane: int, rows: np.ndarray) -> None:
    bits(pages)[ids, plane] = _in_pages(bits(rows), len(ids))


def _write_codes(codec, pages: np.ndarray, ids: np.ndarray, plane: int, rows: np.ndarray) -> None:
    from tests.reference import quantized

    heads, width = rows.shape[1:]
    planes = quantized.page_planes(codec, pages, (2, heads, PAGE), width, width)
    own, all_codes, all_scales = planes[plane % len(planes)]
    codes, scales = quantized.quantize(own, quantized.rotate(own, rows, width), width)
    at = plane % all_codes.shape[1]
    all_codes[ids, at] = _in_pages(quantized.code_bytes(own, codes), len(ids))
    all_scales[ids, at] = _in_pages(scales, len(ids))


def seconds_of(
    run: Callable, before: Callable, budget: float, *, min_runs: int = 3, warms_up: bool = True
) -> list[float]:
    """Times of `run`, each after `before`: as many as fit the budget, at most 2000.

    At least `min_runs`, where one takes less than a second; after a run that does not count if
    `warms_up`.
    """
    if warms_up:
        before()
        run()
    times, end = [], time.perf_counter() + budget
    while not times or (len(times) < min_runs and times[0] < 1) or time.perf_counter() < end:
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if len(times) == 2000:
            break
    return times
