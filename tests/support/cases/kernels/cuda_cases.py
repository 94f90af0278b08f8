# SPDX-License-Identifier: Apache-2.0
"""Specs that the tests of the kernels for GPUs have in common: small, and odd in every way."""

from __future__ import annotations

import pytest

from tir_kernels.spec import CudaTarget, KernelSpec, RopeSpec

F32, F16, BF16 = "float32", "float16", "bfloat16"
# Also runs on a GPU of this machine, where `-m gpu` selects that; see `runner` in conftest.
on_gpu_too = pytest.mark.usefixtures("runner")
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")


def make_spec(heads, dim, dtypes=(F16, F16), page=16, **fields) -> KernelSpec:
    qk, v = dim if isinstance(dim, tuple) else (dim, dim)
    fields.setdefault("target", CudaTarget())
    fields.setdefault("rope", RopeSpec(rotary_dim=qk))
    return KernelSpec(*heads, qk, v, *dtypes, page_size=page, **fields)
