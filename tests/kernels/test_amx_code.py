# SPDX-License-Identifier: Apache-2.0
"""Kernels for AMX, compiled for a CPU that has it and read: tiles used well, and never spilled."""

from __future__ import annotations

import re

import pytest
from tvm.target import Target

import tir_kernels
from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler import vector_target
from tvm_pagedkv.compiler.lowering import compile_kernel

CPU = {"kind": "llvm", "mcpu": "sapphirerapids"}
MLA = {"kind": "mla", "rope": RopeSpec(rotary_dim=0)}
# Tiles of A, tiles of B and sums of a step of a product, each of which is loaded or added to once.
STEPS = [("45", "67", "0123"), ("45", "6", "02"), ("4", "67", "01"), ("4", "6", "0")]


def _assembly(name: str, target: dict, dtypes=("bfloat16", "bfloat16"), **fields) -> str:
    dims = (192, 128) if fields else (128, 128)
    heads = (8, 1) if fields else (8, 2)
    spec = KernelSpec(*heads, *dims, *dtypes, target=vector_target(target), **fields)
    kernel = tir_kernels.build_kernel(name, spec)
    return compile_kernel(kernel, "kernel", Target(target)).inspect_source("s")


def _instructions(assembly: str) -> list[tuple[str, str]]:
    return re.findall(r"^\s+(tdp\w+|tile\w+|ldtilecfg)\s*(.*)$", assembly, re.M)


@pytest.mark.parametrize(
    "name, kv_dtype, fields",
    [
        ("prefill", "bfloat16", {}),
        ("prefill", "int8", {}),
        pytest.param("prefill_shared", "bfloat16", {}, marks=pytest.mark.slow),
        ("mla_prefill", "bfloat16", MLA),
    ],
)
def test_products(name, kv_dtype, fields):
    found = _instructions(_assembly(name, CPU, ("bfloat16", kv_dtype), **fields))
    names = [name for name, _ in found]
    assert names.count("ldtilecfg") == names.count("tilerelease") == 1
    for name, operands in found:
        if name in ("tileloadd", "tilestored"):
            assert "%rsp" not in operands and "%rbp" not in operands, f"spilled: {name} {operands}"
    # The target comes last in AT&T's order. Sums that are loaded are left out.
    targets = [
        re.search(r"%tmm(\d)(?:$|\s*#)", operands)[1]
        for name, operands in found
        if name in ("tileloadd", "tdpbf16ps")
        and (name == "tdpbf16ps" or re.search(r"%tmm[4-7](?:$|\s*#)", operands))
    ]
    kinds = "|".join("".join(step) for step in STEPS)
    assert re.fullmatch(f"(?:{kinds})+", "".join(targets))
    assert "".join(STEPS[0]) in "".join(targets)


@pytest.mark.parametrize("target", [CPU | {"mattr": ["-amx-tile"]}, {**CPU, "mcpu": "znver5"}])
def test_amx_can_be_switched_off(target):
    assert not _instructions(_assembly("prefill", target))


def test_float16_does_without():
    assert not _instructions(_assembly("prefill", CPU, ("float16", "float16")))
