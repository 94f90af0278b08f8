# SPDX-License-Identifier: Apache-2.0
"""Tokens of recurrent layers in shuffled slots of pages, with NaN wherever nothing lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from tir_kernels.recurrent_spec import RecurrentSpec

from ..reference.recurrent import ingredient_rows, recurrence
from .attention_cases import compiled, indptr, normal, tensors_for
from .tolerances import ARITHMETIC

SHAPES = {  # heads, key heads, key dim, value dim
    "4-of-2-heads-128": (4, 2, 128, 128),  # Qwen3-Next and Qwen3.5 have 32 of 16
    "3-heads-24x8": (3, 3, 24, 8),
    "6-of-1-head-7x20": (6, 1, 7, 20),
    "2-heads-64x256": (2, 2, 64, 256),
}
SCALE = 0.3
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
        fields = (self.q, self.k, self.v, self.log_decay, self.beta)
        return Tokens(self.spec, *(x if x is None else x[tokens] for x in fields))

    @property
    def ingredients(self) -> list[np.ndarray]:
        """The arrays that are kept of tokens."""
        fields = (self.k, self.v, self.log_decay, self.beta)
        return [x for x in fields if x is not None]

    def expected(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and states of the reference."""
        return recurrence(self.q, self.k, self.v, self.log_decay, self.beta, state, SCALE)

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
    return normal(rng, (num_pages, *spec.state_shape), "float32")


def assert_states_close(actual, expected) -> None:
    """Compare rows of states, with errors relative to the largest row of a head."""
    size = np.sqrt((expected**2).mean(-1, keepdims=True).max(-2, keepdims=True))
    assert np.isfinite(actual).all()
    assert (np.abs(actual - expected) <= 1e-5 * size).all()


def assert_outputs_close(actual, expected, dtype: str) -> None:
    """Compare rows of outputs, with errors relative to their size."""
    size = np.sqrt((expected**2).mean(-1, keepdims=True))
    errors = np.abs(np.asarray(actual, np.float64) - expected)
    assert (errors <= ARITHMETIC[dtype] * np.maximum(size, np.abs(expected))).all()
