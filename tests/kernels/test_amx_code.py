# SPDX-License-Identifier: Apache-2.0
"""Kernels for AMX, compiled for a CPU that has it and read: tiles used well, and never spilled."""

from __future__ import annotations

import re

import pytest
from tvm.target import Target

import tir_kernels
from tvm_pagedkv import KVCacheConfig
from tvm_pagedkv.compiler.build import kernel_spec
from tvm_pagedkv.compiler.lowering import compile_kernel

CPU = {"kind": "llvm", "mcpu": "sapphirerapids"}
# A step of a product: both rows of tiles of A, both columns of B, and four sums.
STEP = [
    *("tileloadd 4", "tileloadd 5", "tileloadd 6", "tileloadd 7"),
    *("tdpbf16ps 0", "tdpbf16ps 1", "tdpbf16ps 2", "tdpbf16ps 3"),
]
NARROW_STEP = ["tileloadd 4", "tileloadd 5", "tileloadd 6", "tdpbf16ps 0", "tdpbf16ps 2"]


def _assembly(name: str, target: dict, dtype: str = "bfloat16", **fields) -> str:
    config = KVCacheConfig(1, 8, 2, 128, dtype=dtype, **fields).resolved()
    spec = kernel_spec(config, config.layers[0], Target(target))
    kernel = tir_kernels.build_kernel(name, spec)
    return compile_kernel(kernel, "kernel", Target(target)).inspect_source("s")


def _instructions(assembly: str) -> list[tuple[str, str]]:
    return re.findall(r"^\s+(tdp\w+|tile\w+|ldtilecfg)\s*(.*)$", assembly, re.M)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_products_of_prefill(kv_dtype):
    found = _instructions(_assembly("prefill", CPU, kv_dtype=kv_dtype))
    names = [name for name, _ in found]
    assert names.count("ldtilecfg") == names.count("tilerelease") == 1
    for name, operands in found:
        if name in ("tileloadd", "tilestored"):
            assert "%rsp" not in operands and "%rbp" not in operands, f"spilled: {name} {operands}"
    # What is between the products of sums: the operands come last in AT&T's order.
    sums = re.compile(r"%tmm(\d)(?:$|\s*#)")
    steps = [
        f"{name} {sums.search(operands)[1]}"
        for name, operands in found
        if name.startswith("tdp") or (name == "tileloadd" and sums.search(operands)[1] in "4567")
    ]
    kinds = []
    while steps:
        kind = next(k for k in (STEP, NARROW_STEP) if steps[: len(k)] == k)
        kinds.append(kind)
        del steps[: len(kind)]
    assert STEP in kinds


@pytest.mark.parametrize("target", [CPU | {"mattr": ["-amx-tile"]}, {**CPU, "mcpu": "znver5"}])
def test_amx_can_be_switched_off(target):
    assert not _instructions(_assembly("prefill", target))


def test_float16_does_without():
    assert not _instructions(_assembly("prefill", CPU, "float16"))
