# SPDX-License-Identifier: Apache-2.0
"""The kernels of token trees in NumPy, beside those of `python_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ... import reference
from .python_kernels import (
    KERNELS,
    MLA_KERNELS,
    _rope,
    decode,
    prefill,
    prefill_ragged,
    prefill_shared,
    view,
)


class _Tree:
    """The columns that the rows of a sequence see, and where these are, as the kernels know it.

    Parameters
    ----------
    order : ``[n, 2]``; the nodes are the last columns, or more than there are columns.
    num_rows, kv_len : int
    """

    def __init__(self, order: np.ndarray, num_rows: int, kv_len: int):
        n = len(order)
        sees = (order[:, 0] <= order[:, :1]) & (order[:, :1] < order[:, 1])
        depths = sees.sum(axis=1) - 1  # of nodes that hide themselves it does not matter
        before = np.ones((num_rows, max(0, kv_len - n)), bool)
        first = max(0, n - kv_len)
        self.mask = np.concatenate([before, sees[n - num_rows :, first:]], axis=1)
        start = kv_len - n
        self.positions = np.concatenate([np.arange(max(0, start)), start + depths[first:]])


def _attend(
    q, query_indptr, o, lse, order, kv_of: Callable, sm_scale, adjust: Callable, softcap=None,
    slopes=None,
) -> None:  # fmt: skip
    """``kv_of(b)`` gives K and V of a sequence.

    ``adjust(b, rows, tree, q, k)`` rotates q and k, and gives the positions of both.
    """
    q, query_indptr = view(q), view(query_indptr)
    order_indptr, order = view(order[0]), view(order[1])
    for b in range(len(query_indptr) - 1):
        rows = slice(query_indptr[b], query_indptr[b + 1])
        k, v = kv_of(b)
        tree = _Tree(order[order_indptr[b] : order_indptr[b + 1]], len(q[rows]), len(k))
        q_rows, k, *positions = adjust(b, rows, tree, q[rows], k)
        bias = None if slopes is None else reference.alibi_bias(slopes, *positions)
        view(o)[rows], view(lse)[rows] = reference.attention(
            q_rows, k, v, tree.mask, sm_scale, softcap, bias=bias
        )


def tree_paged(
    q, query_indptr, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
    rotary_mode, rope_scale, rope_theta, sm_scale, order_indptr, order, window=None, **extras,
):  # fmt: skip
    q_positions, k_offsets, width = view(q_positions), view(k_offsets), view(q).shape[2]

    def adjust(b, rows, tree, q_rows, k):
        positions = k_offsets[b] + tree.positions
        if window is not None:
            tree.mask &= positions >= reference.first_seen(q_positions[rows, None], window)
        if rotary_mode:
            rope = _rope(rope_theta, width, rope_scale)
            q_rows = reference.rotate(q_rows, q_positions[rows], rope)
            k = reference.rotate(k, positions, rope)
        return q_rows, k, q_positions[rows], positions

    def kv_of(b):
        slots = _slots(b, page_indptr, page_ids, lengths, view(pages).shape[3])
        return reference.gather_slots(view(pages), slots)

    _attend(q, query_indptr, o, lse, (order_indptr, order), kv_of, sm_scale, adjust, **extras)


def _slots(b, page_indptr, page_ids, lengths, page_size):
    indptr = view(page_indptr)
    page_ids = view(page_ids)[indptr[b] : indptr[b + 1]]
    return reference.sequence_slots(page_ids, view(lengths)[b], page_size)


def tree(
    q, query_indptr, k, v, kv_indptr, q_positions, order_indptr, order, o, lse,
    rotary_mode, rope_scale, rope_theta, sm_scale, window=None, **extras,
):  # fmt: skip
    kv_indptr, q_positions, width = view(kv_indptr), view(q_positions), view(q).shape[2]

    def adjust(b, rows, tree, q_rows, k_rows):
        positions = q_positions[rows]
        k_positions = tree.positions + positions[-1] - tree.positions[-1]
        if window is not None:
            tree.mask &= k_positions >= reference.first_seen(positions[:, None], window)
        if rotary_mode:
            rope = _rope(rope_theta, width, rope_scale)
            q_rows = reference.rotate(q_rows, positions, rope)
            k_rows = reference.rotate(k_rows, k_positions, rope)
        return q_rows, k_rows, positions, k_positions

    def kv_of(b):
        columns = slice(kv_indptr[b], kv_indptr[b + 1])
        return view(k)[columns], view(v)[columns]

    _attend(q, query_indptr, o, lse, (order_indptr, order), kv_of, sm_scale, adjust, **extras)


def mla_tree(
    q, query_indptr, pages, page_indptr, page_ids, lengths, o, lse, sm_scale,
    order_indptr, order, adjust=lambda b, rows, tree, q_rows, k: (q_rows, k),
):  # fmt: skip
    pages, width = view(pages), view(o).shape[2]

    def kv_of(b):
        slots = _slots(b, page_indptr, page_ids, lengths, pages.shape[1])
        k = pages[slots // pages.shape[1], slots % pages.shape[1]][:, None]
        return k, k[..., :width]

    _attend(q, query_indptr, o, lse, (order_indptr, order), kv_of, sm_scale, adjust)


def mla_tree_sliding(
    q, query_indptr, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
    sm_scale, order_indptr, order, window,
):  # fmt: skip
    q_positions, k_offsets = view(q_positions), view(k_offsets)

    def hide(b, rows, tree, q_rows, k):
        positions = k_offsets[b] + tree.positions
        tree.mask &= positions >= reference.first_seen(q_positions[rows, None], window)
        return q_rows, k

    mla_tree(
        q, query_indptr, pages, page_indptr, page_ids, lengths, o, lse, sm_scale, order_indptr,
        order, hide,
    )  # fmt: skip


def compact_copy(pages, length_indptr, src_dst_slots, batch_size):
    pages, slots = view(pages), view(src_dst_slots)
    assert view(length_indptr)[batch_size] == slots.shape[1]
    page_size = pages.shape[-2]
    for source, destination in slots.T:
        row = pages[source // page_size, ..., source % page_size, :]
        pages[destination // page_size, ..., destination % page_size, :] = row


KERNELS_WITH_TREES: dict[str, Callable] = {
    **KERNELS,
    "tree_paged": tree_paged,
    "tree_paged_sliding": tree_paged,
    "tree": tree,
    "tree_sliding": tree,
    "compact_copy": compact_copy,
}
MLA_KERNELS_WITH_TREES: dict[str, Callable] = {
    **MLA_KERNELS,
    "mla_tree": mla_tree,
    "mla_tree_sliding": mla_tree_sliding,
    "tree": tree,
    "tree_sliding": tree,
    "compact_copy": compact_copy,
}


def kernels_with(softcap: float | None, slopes: Sequence[float] | None) -> dict[str, Callable]:
    """`KERNELS_WITH_TREES` of a model with a soft-cap of its logits, or with ALiBi."""
    attend = (prefill, decode, prefill_ragged, prefill_shared, tree_paged, tree)
    return {
        name: partial(kernel, softcap=softcap, slopes=slopes) if kernel in attend else kernel
        for name, kernel in KERNELS_WITH_TREES.items()
    }
