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

from ..support.harness.selections import few_of, latin_square

TARGET = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"})
# What a kernel may call: its own task bodies, the runtime's errors, and log2 once for each row.
CALLS = {
    ".L_internal_kernel_task_0",
    ".L_internal_kernel_task_1",
    "kernel_compute_",
    "TVMFFIErrorSetRaisedFromCStrParts",
    "log2f",
    "memset",
}


def _target(cpu: str) -> Target:
    return Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": cpu})


def _assembly(name: str, dtype: str, group_size: int = 2, target: Target = TARGET, **fields) -> str:
    config = KVCacheConfig(1, 2 * group_size, 2, 64, dtype=dtype, **fields).resolved()
    spec = kernel_spec(config, config.layers[0], target)
    kernel = tir_kernels.build_kernel(name, spec)
    return compile_kernel(kernel, "kernel", target).inspect_source("s")


def test_traits():
    traits = vector_target(TARGET)
    assert (traits.lanes, traits.registers, traits.has_f16_convert) == (4, 32, True)
    assert traits.has_sdot and not vector_target(_target("cortex-a57")).has_sdot


@latin_square(3, "dtype", "name")
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


@pytest.mark.parametrize("group_size", few_of([8, 1], 1))
def test_decode_has_kernels_for_other_groups(group_size):
    assert "fmla" in _assembly("decode", "float32", group_size)


def test_codes_are_multiplied_as_matrices():
    target = Target({**TARGET.export(), "mattr": ["+i8mm"]})
    text = _assembly("decode", "float16", 4, target, kv_dtype="int8")
    assert len(re.findall(r"\bsmmla\s", text)) > 32 and not re.search(r"\bsdot\s", text)


@pytest.mark.parametrize(
    ("cpu", "has_dots"),
    [("neoverse-n1", True), pytest.param("cortex-a57", False, marks=pytest.mark.slow)],
)
def test_codes_are_multiplied_as_bytes(cpu, has_dots):
    """Where the CPU has dot products, of which most take a lane of a vector: no broadcasts."""
    text = _assembly("decode", "float16", 4, _target(cpu), kv_dtype="int8")
    dots = len(re.findall(r"\bsdot\s", text))
    by_lane = len(re.findall(r"\bsdot\s+v\d+\.4s, v\d+\.16b, v\d+\.4b\[\d\]", text))
    assert (dots > 32) == has_dots
    assert by_lane >= dots / 2, (by_lane, dots)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        # Rows of A, vectors of B in pairs; their lanes are operands.
        ("float32", {"fmla": 32, "ldr": 8, "ldp": 2}),
        # Pairs of rows of A are put together by a load or a move, and those of B by a zip.
        ("bfloat16", {"bfmmla": 16, "ldr": 8, "mov": 4, "ldp": 2, "zip1": 2, "zip2": 2}),
    ],
)
def test_instructions_of_a_register_tile(dtype, expected):
    """The loop of prefill's products: 8 x 8 sums, two elements of each in a step."""
    target = Target({**TARGET.export(), "mattr": ["+bf16"]})
    loops = [Counter(re.findall(r"^\s+([a-z]\w*)", body, re.M)) for body in _loops(dtype, target)]
    counts = [count for count in loops if expected.items() <= count.items()]
    assert counts, loops
    for count in counts:
        assert sum(count.values()) <= sum(expected.values()) + 6, count


def _loops(dtype: str, target: Target) -> list[str]:
    """The innermost loops of prefill."""
    text = _assembly("prefill", dtype, 4, target)
    loops = re.findall(r"^(\.LBB\w+):((?:(?!^\.LBB)[^\n]*\n)*?[^\n]*\bb\.\w+\s+\1)$", text, re.M)
    return [body for _, body in loops]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
