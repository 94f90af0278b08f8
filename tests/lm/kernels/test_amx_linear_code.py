# SPDX-License-Identifier: Apache-2.0
"""Linear layers compiled for a CPU with AMX, and read: tiles are used well, and never spilled."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import Target

from tvm_pagedkv.compiler import vector_target
from tvm_pagedkv_lm.formats.weight_formats import FORMATS
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.expert_linear import expert_linear
from tvm_pagedkv_lm.kernels.linear.linear import linear
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix

from ...support.harness.amx_assembly import check_products, instructions

CPU = {"kind": "llvm", "mcpu": "sapphirerapids"}
SHAPE = 1024, 2048


def _assembly(kernel, target: dict) -> str:
    module = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    return tvm.tirx.build(module, target=Target(target)).inspect_source("s")


def _tasks(assembly: str) -> list[str]:
    """Return the functions that have instructions on tiles."""
    return [each for each in assembly.split(".cfi_startproc") if instructions(each)]


def _linear(target: dict, dtype: str = "bfloat16"):
    matrix = PackedMatrix(*SHAPE, dtype, vector_target(target))
    return linear(matrix, dtype, dtype, bias=True, residual=True)


def _experts(target: dict):
    matrix = PackedMatrix(*SHAPE, "bfloat16", vector_target(target))
    return expert_linear(matrix, 8, 2, "bfloat16", "float32", gathers=True)


def _codes(target: dict):
    matrix = CodeMatrix(*SHAPE, FORMATS["int8"], vector_target(target))
    return linear(matrix, "bfloat16", "bfloat16", bias=True)


@pytest.mark.parametrize("make", [_linear, _experts, _codes])
def test_products(make):
    """A step of 32 rows and 32 output features is four loads and four products."""
    tasks = _tasks(_assembly(make(CPU), CPU))
    assert tasks
    for task in tasks:
        names = [name for name, _ in instructions(task)]
        assert names.count("ldtilecfg") == names.count("tilerelease") == 1
        # Steps of the wide tiles, which LLVM repeats where it unrolls, and of the narrow ones.
        assert check_products(task) >= 2
        assert "tilestored" in names


@pytest.mark.parametrize("target", [CPU | {"mattr": ["-amx-tile"]}, {**CPU, "mcpu": "znver5"}])
def test_amx_can_be_switched_off(target):
    for make in (_linear, _experts, _codes):
        assert "pagedkv_tile" not in make(target).script()
    assert not PackedMatrix(*SHAPE, "bfloat16", vector_target(target)).has_tiles


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_do_without(dtype):
    """Their kernels are those of the CPU without AMX."""
    off = CPU | {"mattr": ["-amx-tile"]}
    tvm.ir.assert_structural_equal(_linear(CPU, dtype), _linear(off, dtype))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
