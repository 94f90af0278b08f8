# SPDX-License-Identifier: Apache-2.0
"""The widths of the layers of a random world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tir_kernels.codec import codec_of

from ..emulators.python_kernels import LAYER, MLA_LAYER

NUM_QO_HEADS = 2
# A layer is its window (0: none; -n: chunks of n positions), or of MLA this and its window, if any.
MLA = "mla"


def is_latent(kind: int | str) -> bool:
    """Whether a layer is one of MLA."""
    return isinstance(kind, str)


def window_of(kind: int | str) -> int:
    """Return the window of a layer; negative for chunks."""
    return int(kind.removeprefix(MLA) or 0) if isinstance(kind, str) else kind


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
        window = window_of(kind)
        if is_latent(kind):
            dims = {"qk_head_dim": self.latent_dim, "v_head_dim": self.v_dim}
            return {**MLA_LAYER, **dims, "kernel_set": 1, "window": window}
        heads = {"num_qo_heads": NUM_QO_HEADS, "num_kv_heads": 1, "qk_head_dim": self.dim}
        name = "mha_sliding" if window > 0 else "mha_chunked"
        sliding = {"kind": name, "window": abs(window)} if window else {}
        return {**LAYER, **heads, **sliding}
