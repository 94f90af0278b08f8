# SPDX-License-Identifier: Apache-2.0
"""The widths of the layers of a random world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tir_kernels.codec import codec_of

from .python_kernels import LAYER, MLA_LAYER

NUM_QO_HEADS = 2
MLA = "mla"  # a layer is this, or its window (0: none; -n: chunks of n positions)


@dataclass(frozen=True)
class Shapes:
    """Columns of the rows of K and V.

    Parameters
    ----------
    dim : int
        Of heads.
    latent_dim, v_dim : int
        Of latent rows, and of V in these.
    """

    dim: int = 4
    latent_dim: int = MLA_LAYER["qk_head_dim"]
    v_dim: int = MLA_LAYER["v_head_dim"]

    @staticmethod
    def of(codec: str | None) -> Shapes:
        """Shapes as small as a codec allows."""
        found = codec_of(codec) if codec else None
        size = max(found.k.group_size, found.v.group_size) if found else 0
        return Shapes(size, 2 * size, size) if size else Shapes()

    def layer(self, kind: int | str) -> dict[str, Any]:
        """Fields of an MLA layer, or of a layer with a window."""
        if kind == MLA:
            dims = {"qk_head_dim": self.latent_dim, "v_head_dim": self.v_dim}
            return {**MLA_LAYER, **dims, "kernel_set": 1}
        heads = {"num_qo_heads": NUM_QO_HEADS, "num_kv_heads": 1, "qk_head_dim": self.dim}
        name = "mha_sliding" if kind > 0 else "mha_chunked"
        window = {"kind": name, "window": abs(kind)} if kind else {}
        return {**LAYER, **heads, **window}
