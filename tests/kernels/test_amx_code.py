# SPDX-License-Identifier: Apache-2.0
"""Kernels for AMX, compiled for a CPU that has it and read: tiles used well, and never spilled."""

from __future__ import annotations

import pytest
from tvm.target import Target

import tir_kernels
from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler import vector_target
from tvm_pagedkv.compiler.lowering import compile_kernel

from ..support.harness.amx_assembly import check_products, instructions

CPU = {"kind": "llvm", "mcpu": "sapphirerapids"}
MLA = {"kind": "mla", "rope": RopeSpec(rotary_dim=0)}


def _assembly(name: str, target: dict, dtypes=("bfloat16", "bfloat16"), **fields) -> str:
    dims = (192, 128) if fields else (128, 128)
    heads = (8, 1) if fields else (8, 2)
    spec = KernelSpec(*heads, *dims, *dtypes, target=vector_target(target), **fields)
    kernel = tir_kernels.build_kernel(name, spec)
    return compile_kernel(kernel, "kernel", Target(target)).inspect_source("s")


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
    assembly = _assembly(name, CPU, ("bfloat16", kv_dtype), **fields)
    names = [name for name, _ in instructions(assembly)]
    assert names.count("ldtilecfg") == names.count("tilerelease") == 1
    assert check_products(assembly)


@pytest.mark.parametrize("target", [CPU | {"mattr": ["-amx-tile"]}, {**CPU, "mcpu": "znver5"}])
def test_amx_can_be_switched_off(target):
    assert not instructions(_assembly("prefill", target))


def test_float16_does_without():
    assert not instructions(_assembly("prefill", CPU, ("float16", "float16")))
