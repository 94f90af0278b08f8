# SPDX-License-Identifier: Apache-2.0
"""The types that a CPU can convert."""

from __future__ import annotations

from collections.abc import Sequence

from ...spec import KernelSpec, VectorTarget


def require_half_conversion(spec: KernelSpec, *dtypes: str) -> None:
    """Refuse float16 where every element would be a library call."""
    require_half_target(spec.target, dtypes, f"dtype={spec.dtype}, kv_dtype={spec.kv_dtype}")


def require_half_target(target: VectorTarget, dtypes: Sequence[str], got: str) -> None:
    """Do what `require_half_conversion` does, for kernels without a `KernelSpec`."""
    if "float16" in dtypes and not target.has_f16_convert:
        raise ValueError(
            "float16 needs a CPU target that converts float16 in hardware (F16C, AVX-512F or "
            f"AArch64), got {got}, has_f16_convert=False"
        )
