# SPDX-License-Identifier: Apache-2.0
"""Specs of index lanes: a row of keys for each token, by which rows choose what they attend to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .codec import KEY_CODECS
from .spec import FLOAT_DTYPES, GpuTarget, KernelSpec, VectorTarget, row_copies


@dataclass(frozen=True)
class IndexSpec:
    """Everything that decides the code of the kernels of one set of index lanes.

    Parameters
    ----------
    num_heads : int
        Index heads: rows of Q of a token.
    dim : int
        Elements of a key, and of a row of Q.
    dtype, kv_dtype : str
        Type of a step's keys and of Q, and of the pages; the latter may name a codec of
        `KEY_CODECS`.
    page_size : int
        Slots of a page.
    target : VectorTarget or GpuTarget
        Traits of the CPU or the GPU.

    Raises
    ------
    ValueError
        If a type has no kernels.
    """

    num_heads: int
    dim: int
    dtype: str = "float32"
    kv_dtype: str = "float32"
    page_size: int = 16
    target: VectorTarget | GpuTarget = field(default_factory=VectorTarget)

    def __post_init__(self):
        for name, known in (("dtype", FLOAT_DTYPES), ("kv_dtype", FLOAT_DTYPES + KEY_CODECS)):
            if getattr(self, name) not in known:
                names = ", ".join(known)
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")

    @property
    def rows(self) -> KernelSpec:
        """The spec of kernels that append and copy keys."""
        rows = row_copies(self.dim, self.dtype, self.page_size, self.target)
        return replace(rows, kv_dtype=self.kv_dtype)

    @property
    def products(self) -> KernelSpec:
        """The spec of what multiplies Q with keys; they have no V, so it is narrow.

        Pages are those of `rows`: with a codec, the widths of rows decide where scales lie.
        """
        return replace(self.rows, num_qo_heads=self.num_heads, v_head_dim=8)
