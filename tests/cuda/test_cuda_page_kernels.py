# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs that move rows, on the emulator, at odd shapes, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import tvm.testing

from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_rope import ORIGINAL, specs_of
from ..support.cases.kernels.attention_cases import compiled, cuda_text, tensors_for
from ..support.cases.kernels.cuda_cases import BF16, F16, F32, make_spec, on_gpu_too
from ..support.cases.kernels.page_kernel_cases import (
    check_compact_copy,
    check_copy_pages,
    check_copy_single_page,
    check_debug_get_kv,
    check_merge,
    check_rope_append,
    check_split_rotary,
    check_transpose_append,
    fused,
)
from ..support.emulators.cuda_emulator import (
    SCHEDULES,
    counting_loads,
    emulated,
    mutated,
    num_loads,
    schedule,
)
from ..support.harness.selections import latin_square

SPECS = {
    "8:2x128-f16-p16": make_spec((8, 2), 128),
    "5:1x80-bf16-p4": make_spec((5, 1), 80, (BF16, BF16), 4),
    "7:7x40-f32-p1": make_spec((7, 7), 40, (F32, F32), 1),
    "3:1x24-f32-f16-p256": make_spec((3, 1), 24, (F32, F16), 256),
    "1:1x576-f16-bf16-p2": make_spec((1, 1), 576, (F16, BF16), 2),
}
spec = tvm.testing.parameter(by_dict=SPECS)


@latin_square(3, "spec")
@on_gpu_too
def test_copies(spec):
    for num_rows in (0, 37):
        check_transpose_append(spec, num_rows, 0)
        check_debug_get_kv(spec, num_rows, 0)
    check_compact_copy(spec, 30, 0)
    check_copy_single_page(spec, 0)
    for num_copies in (0, 1, 9):
        check_copy_pages(spec, num_copies, 0)


@latin_square(2, "spec")
@on_gpu_too
def test_rotations(spec):
    for apply_rope in (0, 1):
        check_split_rotary(spec, 9, apply_rope, 0)
        qkv, positions, _ = fused(np.random.default_rng(0), spec, 17)
        rope = reference.Rope(rotary_dim=spec.qk_head_dim)
        check_rope_append(spec, rope, qkv, positions, [8, 0, 9], apply_rope)


@pytest.mark.parametrize(
    "name, rotary_dim, theta, scale",
    [
        ("default", 2, 1e4, 1.0),
        ("default", 44, 5e5, 0.5),
        ("yarn", 96, 1e4, 1.0),
        ("proportional", 96, 1e6, 1.0),
    ],
)
@on_gpu_too
def test_rope_append_with_each_rotation(name, rotary_dim, theta, scale):
    rope, expected = specs_of(name, rotary_dim, theta, scale)
    spec = make_spec((6, 2), 96, (F32, F32), rope=rope)
    qkv, _, _ = fused(np.random.default_rng(rotary_dim), spec, 12)
    positions = np.concatenate([np.arange(6), np.arange(6) + 1_000_000]).astype(np.int32)
    check_rope_append(spec, expected, qkv, positions, [6, 6])


@on_gpu_too
def test_longrope_chooses_factors_by_sequence():
    rope, expected = specs_of("longrope", 96)
    spec = make_spec((3, 1), 96, (F32, F32), rope=rope)
    lengths = [0, 5, 6, 0, 1, 1, 0]
    starts = [0, ORIGINAL - 6, ORIGINAL - 6, 0, 0, ORIGINAL, 9]
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    qkv, _, _ = fused(np.random.default_rng(0), spec, len(positions))
    check_rope_append(spec, expected, qkv, positions.astype(np.int32), lengths)


@latin_square(2, "spec")
@on_gpu_too
def test_merge(spec):
    for num_rows in (0, 19):
        check_merge(spec, num_rows, 0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@on_gpu_too
def test_apply_sinks(dtype):
    spec, rng = make_spec((5, 1), 40, (dtype, dtype)), np.random.default_rng(0)
    o = rng.standard_normal((7, 5, 40), np.float32).astype(dtype)
    lse = rng.uniform(-3, 3, (7, 5)).astype(np.float32)
    sinks = np.array([0.5, -np.inf, 3.0, -2.0, 40.0], np.float32)
    lse[2:4] = -np.inf
    expected = reference.apply_sinks(np.where(np.isinf(lse)[..., None], 0, o), lse, sinks)
    o[2:4] = np.nan
    tensor = tensors_for(spec)
    actual = tensor(o), tensor(lse)
    compiled("apply_sinks", spec)(*actual, tensor(sinks))
    reference.assert_close(actual[0].numpy(), expected[0], dtype, "o")
    reference.assert_lse_close(actual[1].numpy(), expected[1], F32, "lse")


@on_gpu_too
def test_latent_rows():
    spec, rng = make_spec((4, 1), (576, 512), kind="mla", page=4), np.random.default_rng(0)
    kv = rng.standard_normal((9, 576), np.float32).astype(F16)
    slots = rng.permutation(20)[:9].astype(np.int32)
    slots[3] = -1
    tensor = tensors_for(spec)
    pages = tensor(np.full((5, 4, 576), np.nan, F16))
    compiled("transpose_append_mla", spec)(pages, tensor(kv), tensor(slots))
    expected = np.full((20, 576), np.nan, F16)
    expected[slots[slots >= 0]] = kv[slots >= 0]
    reference.assert_same_bits(pages.numpy(), expected.reshape(5, 4, 576))
    out = tensor(np.full((2, 9, 576), np.nan, F16))
    compiled("debug_get_kv_mla", spec)(pages, tensor(slots), out, 1)
    kv[3] = np.nan
    reference.assert_same_bits(out.numpy()[1], kv)


def _merge_is_right(source: str) -> bool:
    spec, rng = SPECS["7:7x40-f32-p1"], np.random.default_rng(0)
    states = [rng.standard_normal((3, 7, 40), np.float32) for _ in range(2)]
    lses = [rng.standard_normal((3, 7), np.float32) for _ in range(2)]
    tensor = tensors_for(spec)
    actual = [tensor(x) for x in (states[0], lses[0], states[1], lses[1])]
    emulated(source).get_function("merge")(*actual)
    expected = reference.merge(states[0], lses[0], states[1], lses[1])
    return np.allclose(actual[0].numpy(), expected[0], atol=1e-5, equal_nan=False)


def test_a_missing_barrier_is_caught():
    source = cuda_text("merge", SPECS["7:7x40-f32-p1"])
    found = []
    for text in (source, mutated(source, "  tvm_builtin_cuda_cta_sync();\n")):
        for chosen in SCHEDULES:
            with schedule(chosen):
                found.append(_merge_is_right(text))
    assert all(found[: len(SCHEDULES)]) and not all(found[len(SCHEDULES) :])


def test_rows_have_to_be_aligned():
    spec = make_spec((1, 1), 8)
    tensor = tensors_for(spec)
    rows = tensor(np.zeros((2, 1, 8), F16))
    shifted = tensor(np.zeros((3, 1, 8), F16))._create_view((2, 1, 8), F16, 2)
    pages = tensor(np.zeros((1, 2, 1, 16, 8), F16))
    with pytest.raises(ValueError, match="k.*16 bytes|Misaligned"):
        compiled("transpose_append", spec)(pages, shifted, rows, tensor(np.zeros(2, np.int32)))


def test_a_rotation_of_few_dimensions_leaves_the_rest():
    spec = make_spec((2, 1), 32, (BF16, BF16), rope=RopeSpec(rotary_dim=6))
    qkv, positions, _ = fused(np.random.default_rng(0), spec, 5)
    check_rope_append(spec, reference.Rope(rotary_dim=6), qkv, positions, [5])


def _split_rotary_with_longrope(num_rows: int, start: int = 0) -> int:
    """Compare with the reference; how often the kernels read a position."""
    rope, expected = specs_of("longrope", 64)
    spec = make_spec((2, 1), 64, (F32, F32), rope=rope)
    source = counting_loads(cuda_text("split_rotary", spec), "rope_positions")
    qkv, _, parts = fused(np.random.default_rng(start), spec, num_rows)
    positions = (start + np.arange(num_rows)).astype(np.int32)[::-1].copy()
    tensor = tensors_for(spec)
    outputs = [tensor(np.full(x.shape, np.nan, F32)) for x in parts]
    scaling = expected.scaling
    factors = np.array((*scaling["long_factor"], *scaling["short_factor"]), np.float32)
    num_loads()
    emulated(source).get_function("split_rotary")(
        tensor(qkv), tensor(positions), *outputs, tensor(factors)
    )
    for actual, rows in zip(outputs[:2], parts, strict=False):
        rotated = reference.rotate(rows[::-1], positions[::-1], expected)[::-1]
        reference.assert_close(actual.numpy(), rotated, F32)
    reference.assert_same_bits(outputs[2].numpy(), parts[2])
    return num_loads()


@pytest.mark.parametrize("start", [0, ORIGINAL - 9, ORIGINAL - 8, ORIGINAL])
def test_longrope_split_rotary_takes_the_call_for_one_sequence(start):
    _split_rotary_with_longrope(9, start)


def test_longrope_split_rotary_reads_each_position_as_often_in_a_long_call():
    of_few, of_many = (_split_rotary_with_longrope(n) for n in (20, 600))
    assert 0 < of_many <= 30 * of_few


if __name__ == "__main__":
    tvm.testing.main()
