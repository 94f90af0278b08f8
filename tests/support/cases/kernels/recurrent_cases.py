# SPDX-License-Identifier: Apache-2.0
"""Tokens of recurrent layers in shuffled slots of pages, with NaN wherever nothing lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from tir_kernels.recurrent_spec import RecurrentSpec

from ....reference.recurrent import ingredient_rows, recurrence
from ...harness.tolerances import ARITHMETIC
from .attention_cases import compiled, indptr, normal, tensors_for

SHAPES = {  # heads, key heads, key dim, value dim
    "4-of-2-heads-128": (4, 2, 128, 128),  # Qwen3-Next and Qwen3.5 have 32 of 16
    "3-heads-24x8": (3, 3, 24, 8),
    "6-of-1-head-7x20": (6, 1, 7, 20),
    "2-heads-64x256": (2, 2, 64, 256),
    "2-of-1-head-8x7": (2, 1, 8, 7),  # vectors of one column
}
SCALE = 0.3
STATES = {"float32": 1e-5, "float16": 2**-8, "bfloat16": 2**-6}  # errors of their numbers
SPARE_PAGES = 3


@dataclass
class Tokens:
    """Queries and ingredients of tokens, one after another."""

    spec: RecurrentSpec
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray | None

    @classmethod
    def random(cls, spec: RecurrentSpec, count: int, rng) -> Tokens:
        """Keys of length 1, as models have them, and decays from 0.1 to almost 1."""
        k = normal(rng, (count, spec.num_key_heads, spec.key_dim), "float32")
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        gates = (spec.num_heads, spec.key_dim) if spec.decays_by_channel else (spec.num_heads,)
        return cls(
            spec,
            normal(rng, k.shape, spec.dtype),
            k.astype(spec.dtype),
            normal(rng, (count, spec.num_heads, spec.value_dim), spec.dtype),
            -(2.3 * rng.random((count, *gates), np.float32) ** 4),
            rng.random((count, spec.num_heads), np.float32) if spec.is_delta else None,
        )

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, tokens) -> Tokens:
        return Tokens(self.spec, *(x if x is None else x[tokens] for x in self._arrays))

    def __add__(self, other: Tokens) -> Tokens:
        pairs = zip(self._arrays, other._arrays, strict=True)
        return Tokens(self.spec, *(x if x is None else np.concatenate([x, y]) for x, y in pairs))

    @property
    def _arrays(self) -> tuple:
        return self.q, self.k, self.v, self.log_decay, self.beta

    @property
    def ingredients(self) -> list[np.ndarray]:
        """The arrays that are kept of tokens."""
        fields = (self.k, self.v, self.log_decay, self.beta)
        return [x for x in fields if x is not None]

    def expected(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and states of the reference."""
        dtype = "float64" if self.spec.state_dtype == "float32" else self.spec.state_dtype
        return recurrence(self.q, self.k, self.v, self.log_decay, self.beta, state, SCALE, dtype)

    def pages(self, slots: np.ndarray, num_pages: int) -> np.ndarray:
        """Return pages with the tokens in their slots; a negative slot: nowhere."""
        pages = empty_pages(self.spec, num_pages)
        rows = ingredient_rows(self.k, self.v, self.log_decay, self.beta)
        pages.reshape(-1, self.spec.row_width)[slots[slots >= 0]] = rows[slots >= 0]
        return pages

    def run(
        self,
        states,
        segments: Sequence[tuple[int, int, int]],
        sequences: Sequence[int],
        *,
        rows: Sequence[int] | None = None,
        cpu: str = "native",
        seed: int = 0,
    ) -> np.ndarray:
        """Run the kernel over the tokens in shuffled slots.

        Parameters
        ----------
        states : tvm tensor
            The pool, which is written.
        segments : sequence of (number of tokens, read page, write page)
        sequences : sequence of int
            Segments of each sequence.
        rows : sequence of int, optional
            Row of each token in q and o; -1: it is replayed. By default all have theirs, in order.

        Returns
        -------
        array ``[tokens, num_heads, value_dim]``
            NaN where a token was replayed.
        """
        spec, place = self.spec, tensors_for(self.spec)
        slots, num_pages = random_slots(spec, len(self), np.random.default_rng(seed))
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        has_row, num_rows = rows >= 0, max(rows, default=0) + 1
        q = np.full((num_rows, *self.q.shape[1:]), np.nan, spec.dtype)
        q[rows[has_row]] = self.q[has_row]
        o = place(np.full((num_rows, *self.v.shape[1:]), np.nan, spec.dtype))
        counts, read, write = (list(x) for x in zip(*segments, strict=True))
        tables = [indptr(sequences), indptr(counts), slots, rows, read, write]
        compiled("recurrent_scan", spec, cpu)(
            place(q),
            place(self.pages(slots, num_pages), *page_shift(spec)),
            states,
            *(place(np.int32(x)) for x in tables),
            o,
            SCALE,
        )
        found = np.full(self.v.shape, np.nan, spec.dtype)
        found[has_row] = o.numpy()[rows[has_row]]
        others = np.delete(o.numpy(), rows[has_row], axis=0)
        assert np.isnan(others.astype(np.float32)).all()
        return found


def empty_pages(spec: RecurrentSpec, num_pages: int) -> np.ndarray:
    """Return pages that hold NaN, whatever their bytes are read as."""
    shape = (num_pages, spec.page_size, spec.row_width)
    return np.full((*shape, np.dtype(spec.dtype).itemsize), 255, np.uint8).view(spec.dtype)[..., 0]


def page_shift(spec: RecurrentSpec) -> tuple[int]:
    """Return where pages begin in their allocation: at four bytes."""
    return (4 // np.dtype(spec.dtype).itemsize,)


def random_slots(spec: RecurrentSpec, count: int, rng) -> tuple[np.ndarray, int]:
    """Return different slots for tokens, and how many pages there are."""
    num_pages = -(-count // spec.page_size) + SPARE_PAGES
    return rng.permutation(num_pages * spec.page_size)[:count].astype(np.int32), num_pages


def states_of(spec: RecurrentSpec, num_pages: int, rng) -> np.ndarray:
    """Return a pool of random states."""
    return normal(rng, (num_pages, *spec.state_shape), spec.state_dtype)


def assert_states_close(actual, expected) -> None:
    """Compare rows of states, with errors relative to the largest row of a head.

    Where states are rounded, a sum that lies between two numbers may go to the other one, and what
    comes later goes on from there: almost all are the same, and no error is more than a few units.
    """
    size = np.sqrt((expected**2).mean(-1, keepdims=True).max(-2, keepdims=True))
    dtype, actual = str(actual.dtype), actual.astype(np.float64)
    assert np.isfinite(actual).all()
    errors = np.abs(actual - expected)
    assert (errors <= STATES[dtype] * np.maximum(size, np.abs(expected))).all()
    if dtype != "float32":
        assert (errors == 0).mean() > 0.9


def assert_outputs_close(actual, expected, dtype: str, state_dtype: str = "float32") -> None:
    """Compare rows of outputs, with errors relative to their size.

    A number of a state that was rounded the other way may be larger than the sum.
    """
    size = np.sqrt((expected**2).mean(-1, keepdims=True))
    errors = np.abs(np.asarray(actual, np.float64) - expected)
    tolerance = ARITHMETIC[dtype] + (0 if state_dtype == "float32" else 4 * STATES[state_dtype])
    assert (errors <= tolerance * np.maximum(size, np.abs(expected))).all()


def check_sequences(spec: RecurrentSpec, seed: int) -> None:
    """Decode, prefill and replay in one step; states begin as zeros or in a page."""
    rng, place = np.random.default_rng(seed), tensors_for(spec)
    segments = [(1, 4, 4), (37, -1, 1), (0, -1, 7), (1, 2, 0), (5, 3, 5), (0, 3, 2), (2, -1, 6)]
    total = sum(n for n, _, _ in segments)
    tokens, pool = Tokens.random(spec, total, rng), states_of(spec, 8, rng)
    states, rows = place(pool), rng.permutation(2 * total)[:total]
    replayed = [*range(1, 9), 38, *range(40, 43)]
    rows[replayed] = -1
    actual = tokens.run(states, segments, [1] * len(segments), rows=rows, seed=seed)
    after, begin = states.numpy(), 0
    for count, read, write in segments:
        if count:
            state = np.zeros(pool.shape[1:]) if read < 0 else pool[read]
            o, expected = tokens[begin : begin + count].expected(state)
            has_row = np.flatnonzero(rows[begin : begin + count] >= 0)
            assert_outputs_close(actual[begin + has_row], o[has_row], spec.dtype, spec.state_dtype)
            assert_states_close(after[write], expected[-1])
            begin += count
    np.testing.assert_array_equal(after[[2, 3, 7]], pool[[2, 3, 7]])


def chains_of(parents: list[int]) -> list[list[int]]:
    """Cut a tree, whose nodes come after their parents, at the nodes that branch."""
    children = [[n for n, p in enumerate(parents) if p == node] for node in range(-1, len(parents))]
    chains = []
    for node, parent in enumerate(parents):
        if len(children[parent + 1]) == 1 and parent >= 0:
            continue
        chains.append([node])
        while len(children[chains[-1][-1] + 1]) == 1:
            chains[-1] += children[chains[-1][-1] + 1]
    return chains


def check_tree(spec: RecurrentSpec, seed: int, is_forest: bool) -> None:
    """A segment for each chain of a tree in breadth-first order, beside a sequence that decodes."""
    rng, place = np.random.default_rng(seed), tensors_for(spec)
    parents = [-1]
    for node in range(1, 24):
        parents.append(int(rng.integers(max(parents[-1], -1 if is_forest else 0), node)))
    tokens, pool = Tokens.random(spec, 24, rng), states_of(spec, 26, rng)
    chains = chains_of(parents)
    order = [node for chain in chains for node in chain]
    assert sorted(order) == list(range(24)) and 3 < len(chains) < 24
    page_of = {chain[-1]: 2 + i for i, chain in enumerate(chains)}
    segments = [(len(c), page_of.get(parents[c[0]], 0), page_of[c[-1]]) for c in chains]
    other, states = Tokens.random(spec, 1, rng), place(pool)
    both = tokens[order] + other
    actual = both.run(
        states, [*segments, (1, 1, 1)], [len(segments), 1], rows=[*order, 24], seed=seed
    )
    for node in range(24):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        o, expected = tokens[path].expected(pool[0])
        assert_outputs_close(actual[order.index(node)], o[-1], spec.dtype, spec.state_dtype)
        if node in page_of:
            assert_states_close(states.numpy()[page_of[node]], expected[-1])
    o, expected = other.expected(pool[1])
    assert_outputs_close(actual[24], o[0], spec.dtype, spec.state_dtype)
    assert_states_close(states.numpy()[1], expected[-1])
    np.testing.assert_array_equal(states.numpy()[0], pool[0])
