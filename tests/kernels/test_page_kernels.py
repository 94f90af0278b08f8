# SPDX-License-Identifier: Apache-2.0
"""Append, rotation, copy and merge kernels: odd shapes, against the reference.

Every tensor lies at an odd place in a larger allocation, unused slots hold NaN, and what a kernel
must not write is compared bit for bit.
"""

from __future__ import annotations

import os

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import compiled, normal
from ..support.cases.kernels.kernel_specs import parametrize_cpu
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
from ..support.cases.kernels.page_kernel_cases import unaligned_tensor as tensor
from .test_rope import ORIGINAL, specs_of

# The pool's default is one worker per two CPUs; the parallel paths need two.
os.environ.setdefault("TVM_NUM_THREADS", "2")

MANY_ROWS = 700  # enough for every kernel to take its parallel path


def make_spec(
    heads=(4, 2), head_dim=64, dtypes=("float32", "float32"), page_size=16, rope=None, cpu="native"
) -> KernelSpec:
    return KernelSpec(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        page_size=page_size,
        rope=rope or RopeSpec(rotary_dim=head_dim),
        target=vector_target(cpu),
    )


# Shapes that between them have: one head, many, odd ratios; head dims that are no multiple of a
# vector; every dtype, and page dtypes that differ; the smallest and largest page.
SPECS = {
    "4:2x64-f32-p16": make_spec(),
    "32:8x128-f16-p16": make_spec((32, 8), 128, ("float16",) * 2),
    "8:8x8-bf16-p1": make_spec((8, 8), 8, ("bfloat16",) * 2, 1),
    "71:1x80-f32-p2": make_spec((71, 1), 80, page_size=2),
    "25:5x96-f16-p256": make_spec((25, 5), 96, ("float16",) * 2, 256),
    "7:7x40-bf16-f32-p4": make_spec((7, 7), 40, ("bfloat16", "float32"), 4),
    "6:2x104-f32-bf16-p8": make_spec((6, 2), 104, ("float32", "bfloat16"), 8),
    "3:1x256-f16-bf16-p32": make_spec((3, 1), 256, ("float16", "bfloat16"), 32),
    "2:1x576-bf16-p64": make_spec((2, 1), 576, ("bfloat16",) * 2, 64),
    "1:1x72-f16-p128": make_spec((1, 1), 72, ("float16",) * 2, 128),
    "5:5x16-f32-f16-p16": make_spec((5, 5), 16, ("float32", "float16")),
}
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
parametrize_rows = pytest.mark.parametrize("num_rows", [0, 1, 37, MANY_ROWS])


@pytest.mark.parametrize("seed", [0])
@parametrize_rows
@parametrize_specs
def test_transpose_append(spec, num_rows, seed):
    check_transpose_append(spec, num_rows, seed)


@pytest.mark.parametrize("apply_rope", [0, 1])
@pytest.mark.parametrize("seed", [0])
@parametrize_rows
@parametrize_specs
def test_split_rotary(spec, num_rows, apply_rope, seed):
    check_split_rotary(spec, num_rows, apply_rope, seed)


@pytest.mark.parametrize("apply_rope", [0, 1])
@pytest.mark.parametrize("seed", [0])
@parametrize_rows
@parametrize_specs
def test_rope_append(spec, num_rows, apply_rope, seed):
    qkv, positions, _ = fused(np.random.default_rng(seed), spec, num_rows)
    rope = reference.Rope(rotary_dim=spec.qk_head_dim)
    lengths = [num_rows // 2, 0, num_rows - num_rows // 2]
    check_rope_append(spec, rope, qkv, positions, lengths, apply_rope, seed=seed)


@parametrize_cpu("x86-64-v3", "x86-64")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rope_append_for_lesser_cpus(cpu, dtype):
    spec = make_spec((5, 1), 104, (dtype, dtype), cpu=cpu)
    qkv, positions, _ = fused(np.random.default_rng(0), spec, 37)
    rope = reference.Rope(rotary_dim=104)
    check_rope_append(spec, rope, qkv, positions, [37], cpu=cpu)


@pytest.mark.parametrize(
    "name, rotary_dim, theta, scale",
    [
        ("default", 32, 1e4, 1.0),  # partial rotation
        ("default", 2, 1e4, 1.0),
        ("default", 44, 5e5, 0.5),  # halves of 22, a tail of 52
        ("linear", 96, 1e4, 1.0),
        ("llama3", 96, 5e5, 1.0),
        ("yarn", 96, 1e4, 1.0),
        ("yarn-deepseek", 64, 1e4, 1.0),
        ("yarn-gpt-oss", 96, 1.5e5, 1.0),
        ("proportional", 96, 1e6, 1.0),
    ],
)
def test_rope_append_with_each_rotation(name, rotary_dim, theta, scale):
    rope, expected = specs_of(name, rotary_dim, theta, scale)
    spec = make_spec((6, 2), 96, rope=rope)
    qkv, _, _ = fused(np.random.default_rng(rotary_dim), spec, 50)
    positions = np.concatenate([np.arange(25), np.arange(25) + 1_000_000]).astype(np.int32)
    check_rope_append(spec, expected, qkv, positions, [25, 25])


@pytest.mark.parametrize("name", ["longrope", "longrope-attention-factor"])
def test_longrope_chooses_factors_by_sequence(name):
    rope, expected = specs_of(name, 96)
    spec = make_spec((6, 2), 96, rope=rope)
    # Ends one short of the limit, at it, beyond it, wholly beyond; empty ones in between.
    lengths = [0, 5, 6, 0, 0, 7, 20, 1, 1, 0]
    starts = [0, ORIGINAL - 6, ORIGINAL - 6, 0, 0, ORIGINAL - 6, 3 * ORIGINAL, 0, ORIGINAL, 9]
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    qkv, _, _ = fused(np.random.default_rng(0), spec, len(positions))
    check_rope_append(spec, expected, qkv, positions.astype(np.int32), lengths)


@pytest.mark.parametrize("start", [0, ORIGINAL - 9, ORIGINAL - 8, ORIGINAL])
def test_longrope_split_rotary_takes_the_call_for_one_sequence(start):
    rope, expected = specs_of("longrope", 64)
    spec = make_spec((6, 2), 96, rope=rope)
    qkv, _, (q, k, v) = fused(np.random.default_rng(start), spec, 9)
    positions = (start + np.arange(9)).astype(np.int32)
    outputs = [tensor(np.full(x.shape, np.nan, spec.dtype)) for x in (q, k, v)]
    scaling = expected.scaling
    factors = np.array((*scaling["long_factor"], *scaling["short_factor"]), np.float32)
    compiled("split_rotary", spec)(tensor(qkv), tensor(positions), *outputs, tensor(factors))
    for actual, want in zip(outputs[:2], (q, k), strict=True):
        rotated = reference.rotate(want, positions, expected)
        reference.assert_close(actual.numpy(), rotated, spec.dtype)
    reference.assert_same_bits(outputs[2].numpy(), v)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("num_rows", [0, 1, 37, 3000])
@parametrize_specs
def test_merge(spec, num_rows, seed):
    check_merge(spec, num_rows, seed)


@pytest.mark.parametrize("lowest", [-5e4, -1e30, np.finfo(np.float32).min])
def test_merge_with_a_finite_lowest_lse(lowest):
    spec = SPECS["4:2x64-f32-p16"]
    rng = np.random.default_rng(0)
    o = normal(rng, (3, 4, 64), "float32")
    lse = rng.uniform(-3, 3, (3, 4)).astype(np.float32)
    o_other, lse_other = np.zeros_like(o), np.full_like(lse, lowest)
    for first, second in (((o, lse), (o_other, lse_other)), ((o_other, lse_other), (o, lse))):
        actual = [tensor(x) for x in first]
        compiled("merge", spec)(*actual, *(tensor(x) for x in second))
        reference.assert_close(actual[0].numpy(), o, "float32", "o")
        reference.assert_lse_close(actual[1].numpy(), lse, "float32", "lse")


@pytest.mark.parametrize("seed", [0])
@parametrize_specs
def test_copy_single_page(spec, seed):
    check_copy_single_page(spec, seed)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("num_copies", [0, 1, 40])
@parametrize_specs
def test_copy_pages(spec, num_copies, seed):
    check_copy_pages(spec, num_copies, seed)


@pytest.mark.parametrize("seed", [0])
@parametrize_rows
@parametrize_specs
def test_debug_get_kv(spec, num_rows, seed):
    check_debug_get_kv(spec, num_rows, seed)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("num_copies", [0, 1, 30, 1500])
@parametrize_specs
def test_compact_copy_is_done_in_order(spec, num_copies, seed):
    check_compact_copy(spec, num_copies, seed)


def test_pools_beyond_two_to_the_31_elements():
    spec = make_spec((1, 1), 576, ("float16",) * 2, 256)
    num_pages = 2**32 // (2 * 256 * 576) + 2
    nbytes = num_pages * 2 * 256 * 576 * 2
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 2**30:
        pytest.skip("needs 1 GiB of free memory")
    pool = tvm.runtime.from_dlpack(
        _aligned_zeros(nbytes, np.float16).reshape(num_pages, 2, 1, 256, 576)
    )
    k, v = (np.full((1, 1, 576), value, np.float16) for value in (1.0, 2.0))
    last = np.array([num_pages * 256 - 1], np.int32)
    compiled("transpose_append", spec)(pool, tensor(k), tensor(v), tensor(last))
    compiled("copy_single_page", spec)(pool, num_pages - 1, num_pages - 2, 256)
    out = [tensor(np.zeros((1, 1, 1, 576), np.float16)) for _ in range(2)]
    compiled("debug_get_kv", spec)(pool, tensor(last - 256), *out, 0)
    assert (out[0].numpy() == 1).all() and (out[1].numpy() == 2).all()


def _aligned_zeros(nbytes: int, dtype) -> np.ndarray:
    """Zeros that take no memory until touched, aligned as `from_dlpack` wants it."""
    backing = np.zeros(nbytes + 64, np.uint8)
    start = -backing.ctypes.data % 64
    return backing[start : start + nbytes].view(dtype)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
