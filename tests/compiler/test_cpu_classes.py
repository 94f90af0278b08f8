# SPDX-License-Identifier: Apache-2.0
"""Classes of CPUs: which one a target is of, and what its kernels do."""

from __future__ import annotations

import platform

import pytest

from tir_kernels.cpu.isa.bf16 import PairOperands
from tir_kernels.cpu.isa.matrices.tile_pairs import TilePairs
from tir_kernels.cpu.isa.operands import Float32Operands
from tir_kernels.cpu.rows.products import single_row_operands
from tir_kernels.cpu.tiles.kv_operands import operands
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler import choices, class_of, resolve_target, targets, vector_target
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix

from ..support.cases.kernels.kernel_specs import BF16, make_spec

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 CPUs")
BEYOND = ["+avx512bf16", "+avx512vnni"]

# CPU, its class, register tile, where bfloat16 is pairs: in decode, and in register tiles.
CLASSES = [
    ("znver4", "Zen 4", (8, 2), True, True),
    ("znver5", "AVX-512", (8, 2), True, True),
    ("x86-64-v4", "AVX-512", (8, 2), False, False),
    ("skylake-avx512", "Intel AVX-512", (6, 4), False, False),
    ("icelake-server", "Intel AVX-512", (6, 4), False, False),
    ("cooperlake", "Intel AVX-512", (6, 4), True, False),
    ("sapphirerapids", "Intel AVX-512", (6, 4), True, False),
    ("x86-64-v3", "AVX2", (6, 2), False, False),
    ("znver3", "AVX2", (6, 2), False, False),
    ("haswell", "AVX2", (6, 2), False, False),
    ("x86-64-v2", "128-bit vectors", (6, 2), False, False),
]


@needs_x86
@pytest.mark.parametrize("cpu, name, tile, in_decode, in_tiles", CLASSES)
def test_kernels_are_chosen_by_the_class(cpu, name, tile, in_decode, in_tiles):
    traits = vector_target(cpu)
    assert class_of(cpu).name == name
    assert (traits.tile_rows, traits.tile_vectors) == tile
    spec = make_spec((8, 2), 64, (BF16, BF16), target=traits)
    kinds = {False: Float32Operands, True: PairOperands}
    assert type(operands(spec, BF16)) is (TilePairs if traits.has_amx else kinds[in_tiles])
    assert type(single_row_operands(spec)) is kinds[in_decode]
    matrix = PackedMatrix(64, 64, BF16, traits)
    assert matrix.has_tiles == traits.has_amx
    assert matrix.has_pairs == (in_tiles or traits.has_amx)
    line = choices(traits)
    assert f"{tile[0]} x {tile[1]} vectors" in line
    where = ["decode"] * in_decode + ["prefill", "linear layers"] * in_tiles
    assert f"bfloat16 in {', '.join(where) or 'nothing'};" in line
    assert ("AMX" in line) == traits.has_amx == (cpu == "sapphirerapids")


def test_arm_has_a_class():
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"}
    assert class_of(target).name == "AArch64"


@needs_x86
@pytest.mark.parametrize(
    "fields, name",
    [
        ({"mcpu": "x86-64-v4", "mattr": BEYOND, "model": "sapphirerapids"}, "Intel AVX-512"),
        ({"mcpu": "x86-64-v4", "mattr": BEYOND, "model": "znver4"}, "Zen 4"),
        ({"mcpu": "x86-64-v4", "mattr": BEYOND, "model": "znver5"}, "AVX-512"),
        ({"mcpu": "x86-64-v4", "mattr": BEYOND, "model": "a-later-one"}, "AVX-512"),
        ({"mcpu": "x86-64-v4", "mattr": ["+amx-tile"]}, "Intel AVX-512"),
        # A hypervisor hides AVX-512.
        ({"mcpu": "x86-64-v3", "model": "sapphirerapids"}, "AVX2"),
        ({"mcpu": "x86-64", "model": "znver5"}, "128-bit vectors"),
    ],
)
def test_the_model_names_the_cpu_where_a_level_does_not(fields, name):
    assert class_of({"kind": "llvm", **fields}).name == name


@needs_x86
@pytest.mark.parametrize(
    "cpu, level, model",
    [
        ("sapphirerapids", "x86-64-v4", None),  # AMX says as much
        ("icelake-server", "x86-64-v4", "icelake-server"),
        ("znver4", "x86-64-v4", "znver4"),
        ("znver5", "x86-64-v4", None),
        ("znver3", "x86-64-v3", None),
        ("haswell", "x86-64-v3", None),
    ],
)
def test_native_names_the_cpu_where_its_class_is_not_that_of_the_level(
    monkeypatch, cpu, level, model
):
    features = frozenset(targets.required_features(resolve_target(cpu)))
    monkeypatch.setattr(targets, "cpu_features", lambda: features)
    monkeypatch.setattr(targets.codegen, "llvm_get_system_cpu", lambda: cpu)
    targets._target_with.cache_clear()
    try:
        target = resolve_target("native")
        assert (target.attrs["mcpu"], target.attrs.get("model")) == (level, model)
        assert class_of(target) == class_of(cpu)
        assert vector_target(target) == vector_target(cpu)
    finally:
        targets._target_with.cache_clear()


def test_a_tile_that_leaves_several_vectors_is_refused():
    assert VectorTarget(lanes=8, tile=(4, 7)).tile_vectors == 7
    with pytest.raises(ValueError, match=r"got tile=\(4, 5\) with 8 vectors"):
        VectorTarget(lanes=8, tile=(4, 5))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
