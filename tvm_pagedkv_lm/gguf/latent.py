# SPDX-License-Identifier: Apache-2.0
"""The projection of K and V of latent attention (MLA), which GGUF files have in two tensors.

That of K has a row for each latent feature.
"""

from __future__ import annotations

import numpy as np

K_PART, V_PART = ".attn_k_b.weight", ".attn_v_b.weight"  # one tensor of directories


def v_of(name: str) -> str:
    """Return the name of the tensor with the part of V, of one with the part of K."""
    return name.removesuffix(K_PART) + V_PART


def k_of(name: str) -> str:
    """Return the name of the tensor with the part of K, of one with the part of V."""
    return name.removesuffix(V_PART) + K_PART


def joined(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the projection ``[heads * (nope + v), rank]`` of both.

    Parameters
    ----------
    k : array ``[heads, rank, nope]``
    v : array ``[heads, v, rank]``
    """
    both = np.concatenate([k.swapaxes(1, 2), v], axis=1)
    return both.reshape(-1, both.shape[-1])
