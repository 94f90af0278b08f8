# SPDX-License-Identifier: Apache-2.0
"""Kernels for AArch64, compiled here and read: vectors of NEON throughout, conversions included."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tvm.target import Target

import tir_kernels
from tvm_pagedkv import KVCacheConfig
from tvm_pagedkv.compiler.build import kernel_spec, vector_target
from tvm_pagedkv.compiler.lowering import compile_kernel

TARGET = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"})
# What a kernel may call: its own task body, the runtime's errors, and log2 once for each row.
CALLS = {
    ".L_internal_kernel_task_0",
    "kernel_compute_",
    "TVMFFIErrorSetRaisedFromCStrParts",
    "log2f",
    "memset",
}


def _assembly(name: str, dtype: str, group_size: int = 2) -> str:
    config = KVCacheConfig(1, 2 * group_size, 2, 64, dtype=dtype).resolved()
    spec = kernel_spec(config, config.layers[0], TARGET)
    kernel = tir_kernels.build_kernel(name, spec)
    return compile_kernel(kernel, "kernel", TARGET).inspect_source("s")


def test_traits():
    traits = vector_target(TARGET)
    assert (traits.lanes, traits.registers, traits.has_f16_convert) == (4, 32, True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["decode", "prefill", "rope_append"])
def test_kernels_use_vectors(name, dtype):
    text = _assembly(name, dtype)
    called = {
        target for target in re.findall(r"\bbl\s+(\S+)", text) if "__tvm_set_raised" not in target
    }
    assert called <= CALLS, called
    count = Counter(re.findall(r"^\s+([a-z]\w+)\s", text, re.M))
    vector = len(re.findall(r"\bfml[as]\s+v\d+\.4s", text))
    scalar = count["fmadd"] + count["fmsub"] + count["fnmadd"] + count["fnmsub"]
    if name != "rope_append":  # whose products are single roundings by definition
        assert vector > 100 and scalar < vector / 20, (vector, scalar)
    if dtype == "float16":
        assert count["fcvtl"] and count["fcvtn"]
        assert count["fcvt"] < count["fcvtl"] + count["fcvtn"], "one by one"
    if dtype == "bfloat16":
        assert count["shll"] or count["ushll"]


@pytest.mark.parametrize("group_size", [1, 8])
def test_decode_has_kernels_for_other_groups(group_size):
    assert "fmla" in _assembly("decode", "float32", group_size)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
