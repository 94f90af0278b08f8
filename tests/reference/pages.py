# SPDX-License-Identifier: Apache-2.0
"""The specification of pages: which slots a page table names, what an append writes there."""

from __future__ import annotations

import numpy as np


def sequence_slots(page_ids: np.ndarray, last_page_len: int, page_size: int) -> np.ndarray:
    """Slots of a sequence, in order of position."""
    if len(page_ids) == 0:
        return np.zeros(0, dtype=np.int64)
    slots = (np.asarray(page_ids)[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return slots[: (len(page_ids) - 1) * page_size + last_page_len]


def gather_slots(pages: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``pages [P, 2, Hk, page, D]`` at ``slots [n]`` as K and V ``[n, Hk, D]``."""
    page_size = pages.shape[3]
    rows = pages[slots // page_size, :, :, slots % page_size]
    return rows[:, 0], rows[:, 1]


def append(pages: np.ndarray, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """A copy of `pages` with ``k, v [T, Hk, D]`` written at the slots of ``slots [T]``."""
    pages = pages.copy()
    page_size = pages.shape[3]
    for row, slot in enumerate(slots):
        if slot >= 0:
            pages[slot // page_size, 0, :, slot % page_size] = k[row].astype(pages.dtype)
            pages[slot // page_size, 1, :, slot % page_size] = v[row].astype(pages.dtype)
    return pages


def table_lengths(indptr: np.ndarray, last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """Lengths ``[B]`` of the sequences of a page table; 0 for one without a page."""
    num_pages = np.diff(indptr)
    return np.where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)


def append_at_positions(pages, rows, batch_indices, positions, indices, indptr) -> np.ndarray:
    """A copy of ``pages [P, page, ...]`` with ``rows [T, ...]`` at positions of its sequences."""
    pages = pages.copy()
    page_size = pages.shape[1]
    for row, b, position in zip(rows, batch_indices, positions, strict=True):
        if b >= 0:
            page = indices[indptr[b] + position // page_size]
            pages[page, position % page_size] = row.astype(pages.dtype)
    return pages


def vector_sparse_offsets(
    blocks, block_indptr, kv_lens, stride_block, stride_n, block_size
) -> list[np.ndarray]:
    """Per sequence, the offset of each of its positions."""
    return [
        blocks[block_indptr[b] + np.arange(n) // block_size] * stride_block
        + np.arange(n) % block_size * stride_n
        for b, n in enumerate(kv_lens)
    ]
