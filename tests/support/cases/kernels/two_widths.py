# SPDX-License-Identifier: Apache-2.0
"""Pages whose rows of K and of V have two widths: flat for kernels, padded for the reference."""

from __future__ import annotations

import numpy as np

from tir_kernels.spec import KernelSpec


def padded_shape(spec: KernelSpec, num_pages: int) -> tuple[int, ...]:
    """Shape of the reference's pages: both kinds of rows have the larger width."""
    width = max(spec.qk_head_dim, spec.v_head_dim)
    return (num_pages, 2, spec.num_kv_heads, spec.page_size, width)


def flat(spec: KernelSpec, pages: np.ndarray) -> np.ndarray:
    """Return padded pages as kernels take them: rows of K, then those of V."""
    widths = spec.qk_head_dim, spec.v_head_dim
    planes = [pages[:, i, ..., :width].reshape(len(pages), -1) for i, width in enumerate(widths)]
    return np.concatenate(planes, axis=1)


def padded(spec: KernelSpec, pages: np.ndarray) -> np.ndarray:
    """Return flat pages as the reference takes them, with zeros behind the narrower rows."""
    whole = np.zeros(padded_shape(spec, len(pages)), pages.dtype)
    k_end = spec.num_kv_heads * spec.page_size * spec.qk_head_dim
    rows = pages[:, :k_end], pages[:, k_end:]
    for i, width in enumerate((spec.qk_head_dim, spec.v_head_dim)):
        whole[:, i, ..., :width] = rows[i].reshape(*whole[:, i].shape[:-1], width)
    return whole


def fused(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return rows of Q, K and V as one array ``[T, elements]``."""
    return np.concatenate([x.reshape(len(x), -1) for x in (q, k, v)], axis=1)
