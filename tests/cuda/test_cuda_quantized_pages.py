# SPDX-License-Identifier: Apache-2.0
"""Kernels that move rows of quantized pages on GPUs, emulated, against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tir_kernels.spec import RopeSpec

from ..support.cases.kernels import quantized_cases
from ..support.cases.kernels.attention_cases import tensor
from ..support.cases.kernels.cuda_cases import BF16, F16, F32, make_spec, parametrize_seed
from ..support.harness.selections import every_nth, with_slow

INT8, FP8, INT4 = "int8", "float8_e4m3fn", "int4"
PARTIAL = RopeSpec(rotary_dim=20)
SPECS = {
    "8:2x128-f16-int8-p16": make_spec((8, 2), 128, (F16, INT8)),
    "3:1x64-bf16-int8-p4-partial": make_spec((3, 1), 64, (BF16, INT8), 4, rope=PARTIAL),
    "5:5x104-f32-fp8-p16": make_spec((5, 5), 104, (F32, FP8), 16),
    "2:2x256-f16-fp8-p256": make_spec((2, 2), 256, (F16, FP8), 256),
    "4:2x96-bf16-int4-p1": make_spec((4, 2), 96, (BF16, INT4), 1),
    "8:2x128-f16-int4-p8": make_spec((8, 2), 128, (F16, INT4), 8),
    "3:1x64-f32-int4-p4-partial": make_spec((3, 1), 64, (F32, INT4), 4, rope=PARTIAL),
    "1:1x32-f16-int4-p1": make_spec((1, 1), 32, (F16, INT4), 1),
}
NONE = RopeSpec(rotary_dim=0)
MLA = {
    f"4x{v}+{rest}-{dtype}-{codec}": make_spec(
        (4, 1), (v + rest, v), (dtype, codec), 8, kind="mla", rope=NONE
    )
    for v, rest, dtype, codec in ((512, 64, BF16, INT8), (64, 32, F16, FP8), (512, 64, F16, INT4))
}
# Other heads with codecs that the rest has.
REPEATED = (
    "8:2x128-f16-int8-p16",
    "2:2x256-f16-fp8-p256",
    "4:2x96-bf16-int4-p1",
    "1:1x32-f16-int4-p1",
)


def some(specs: dict) -> list:
    return with_slow(specs.values(), *(specs[name] for name in REPEATED))


@pytest.fixture(autouse=True)
def aligned_tensors(monkeypatch):
    """Arrays of rows start at multiples of 16 bytes, as GPUs want them."""

    def aligned(array, *shift):
        return tensor(array, *shift or ([16 // array.itemsize] if array.dtype != "int32" else []))

    monkeypatch.setattr(quantized_cases, "tensor", aligned)


@pytest.mark.parametrize("spec", some(SPECS), ids=SPECS)
@parametrize_seed
def test_append(spec, seed):
    quantized_cases.check_transpose_append(spec, 60, seed)
    for apply_rope in (0, 1):
        quantized_cases.check_rope_append(spec, 60, apply_rope, seed)


@pytest.mark.parametrize("name", with_slow(["int8", "float8_e4m3fn"], "int8"))
@parametrize_seed
def test_append_by_static_scales(name, seed):
    specs = [s for s in SPECS.values() if s.kv_dtype == name]
    spec = replace(specs[0], static_scales=True)
    quantized_cases.check_transpose_append(spec, 60, seed)
    for apply_rope in (0, 1):
        quantized_cases.check_rope_append(spec, 60, apply_rope, seed)


@pytest.mark.parametrize("spec", MLA.values(), ids=MLA)
@parametrize_seed
def test_append_of_latent_rows(spec, seed):
    quantized_cases.check_transpose_append_mla(spec, 60, seed)


@pytest.mark.parametrize("spec", every_nth((SPECS | MLA).values(), 3), ids=SPECS | MLA)
@parametrize_seed
def test_copies_and_reads(spec, seed):
    quantized_cases.check_copies(spec, seed)
    quantized_cases.check_debug_get_kv(spec, 60, seed)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
