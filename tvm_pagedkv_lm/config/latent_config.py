# SPDX-License-Identifier: Apache-2.0
"""`Latent`: the shape of multi-head latent attention (MLA), and the layers of a cache for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_pagedkv.config import LayerSpec, RopeConfig


@dataclass(frozen=True)
class Latent:
    """The widths of multi-head latent attention.

    Parameters
    ----------
    rank : int
        Width of the compressed K and V of a token, which all heads share.
    rope_dim : int
        Width of the rotated part of K, which all heads share, and of that of each head of Q.
    nope_dim, v_dim : int
        Width of the rest of a head of Q and K, and of a head of V.
    q_rank : int, optional
        Width of the compressed Q; None: Q is projected from the hidden state.
    is_interleaved : bool
        Whether the checkpoint's rotation pairs adjacent features. Loading permutes them.
    growth : (float, int), optional
        A factor and a length: Q is multiplied by ``1 + factor * log(1 + position // length)``.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None
    is_interleaved: bool = True
    growth: tuple[float, int] | None = None

    @property
    def width(self) -> int:
        """Width of a row in the cache."""
        return self.rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of a head of Q and K before absorption."""
        return self.nope_dim + self.rope_dim

    def layer(self, rope: RopeConfig, **options: Any) -> LayerSpec:
        """Return the layer of a cache; the model rotates by `rope`."""
        return LayerSpec(
            "mla",
            qk_head_dim=self.width,
            v_head_dim=self.rank,
            rope=rope,
            mla_original_qk_head_dim=self.qk_dim,
            mla_original_v_head_dim=self.v_dim,
            **options,
        )
