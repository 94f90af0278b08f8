# SPDX-License-Identifier: Apache-2.0
"""Kernels for pages whose rows of K and of V have two widths, on CPUs and the CUDA emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.spec import CudaTarget

from .. import reference
from ..support.cases.kernels import two_widths
from ..support.cases.kernels.attention_cases import PagedBatch, compiled, normal, tensors_for
from ..support.cases.kernels.kernel_specs import BF16, DECODE_BATCHES, F16, F32, make_spec
from ..support.cases.kernels.page_kernel_cases import pages_for, shuffled_slots, unaligned_tensor
from ..support.harness.selections import latin_square

CPU_SPECS = {
    "8:2x192/128-f32": make_spec((8, 2), (192, 128)),
    "6:6x128/64-bf16": make_spec((6, 6), (128, 64), (BF16, BF16)),
    "4:2x24/104-f16-p4": make_spec((4, 2), (24, 104), (F16, F16), 4),
}
CUDA_SPECS = {
    "cuda-4:2x192/128-f16": make_spec((4, 2), (192, 128), (F16, F16), target=CudaTarget()),
    "cuda-3:3x24/40-f32-p1": make_spec((3, 3), (24, 40), (F32, F32), 1, target=CudaTarget()),
}
SPECS = CPU_SPECS | CUDA_SPECS
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
BATCH = [(3, 70), (0, 33), (2, 2), (40, 65)]


@latin_square(2, "spec")
@parametrize_specs
def test_attention(spec):
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], 0)
    case.decode(inline=True)
    case.verify(inline=True)
    for causal in (True, False):
        case = PagedBatch(spec, BATCH, 0)
        case.prefill(causal)
        case.verify(causal)


@latin_square(2, "spec")
@parametrize_specs
@pytest.mark.parametrize("apply_rope", [0, 1])
def test_appends(spec, apply_rope):
    """`rope_append` of fused rows, and `split_rotary` then `transpose_append`: the same pages."""
    tensor, rng, num_rows = tensors_for(spec, unaligned_tensor), np.random.default_rng(0), 21
    q, k, v = (
        normal(rng, (num_rows, heads, width), spec.dtype)
        for heads, width in (
            (spec.num_qo_heads, spec.qk_head_dim),
            (spec.num_kv_heads, spec.qk_head_dim),
            (spec.num_kv_heads, spec.v_head_dim),
        )
    )
    qkv, positions = two_widths.fused(q, k, v), rng.integers(0, 9999, num_rows).astype(np.int32)
    slots = shuffled_slots(rng, spec, num_rows, pages_for(spec, num_rows))
    slots[2::7] = -1
    shape = two_widths.padded_shape(spec, pages_for(spec, num_rows))
    empty = two_widths.flat(spec, np.full(shape, np.nan, spec.kv_dtype))
    outputs = [tensor(np.full(x.shape, np.nan, spec.dtype)) for x in (q, k, v)]
    appended = tensor(empty)
    arrays = [tensor(x) for x in (np.array([0, num_rows], np.int32), positions, slots)]
    compiled("rope_append", spec)(tensor(qkv), *arrays, outputs[0], appended, apply_rope)
    rotated = tensor(np.full(q.shape, np.nan, spec.dtype))
    parts = [rotated, *outputs[1:]]
    compiled("split_rotary", spec)(tensor(qkv), arrays[1], *parts, apply_rope)
    written = tensor(empty)
    compiled("transpose_append", spec)(written, *outputs[1:], arrays[2])

    rope = reference.Rope(rotary_dim=spec.qk_head_dim)
    want = [reference.rotate(x, positions, rope) if apply_rope else x for x in (q, k)]
    for actual in (outputs[0], rotated):
        reference.assert_close(actual.numpy(), want[0], spec.dtype, "q")
    kept = slots >= 0
    for pages in (appended, written):
        found = two_widths.padded(spec, pages.numpy())
        assert np.isnan(pages.numpy()).sum() == empty.size - kept.sum() * (k[0].size + v[0].size)
        k_rows, v_rows = reference.gather_slots(found, slots[kept])
        k_rows, v_rows = k_rows[..., : spec.qk_head_dim], v_rows[..., : spec.v_head_dim]
        reference.assert_close(k_rows, want[1][kept], spec.dtype, "k")
        reference.assert_same_bits(v_rows, v[kept])


@latin_square(2, "spec")
@parametrize_specs
def test_copies(spec):
    tensor, rng = tensors_for(spec, unaligned_tensor), np.random.default_rng(0)
    pages = normal(rng, two_widths.padded_shape(spec, 7), spec.kv_dtype)
    length = max(1, spec.page_size - 1)
    actual, want = tensor(two_widths.flat(spec, pages)), pages.copy()
    compiled("copy_single_page", spec)(actual, 3, 1, length)
    want[1, ..., :length, :] = pages[3, ..., :length, :]
    copies = np.array([[0, 6], [2, 4], [length, spec.page_size]], np.int32)
    compiled("copy_pages", spec)(actual, tensor(copies, 3))
    for source, destination, count in copies.T:
        want[destination, ..., :count, :] = pages[source, ..., :count, :]
    slots = rng.integers(0, 7 * spec.page_size, (2, 9)).astype(np.int32)
    indptr = np.array([0, 4, 9], np.int32)
    compiled("compact_copy", spec)(actual, tensor(indptr, 3), tensor(slots), 2)
    for source, destination in slots.T:
        k, v = reference.gather_slots(want, np.array([source]))
        want = reference.append(want, k, v, np.array([destination]))
    reference.assert_same_bits(actual.numpy(), two_widths.flat(spec, want))

    at = shuffled_slots(rng, spec, 7, 7)
    shape = (2, len(at), spec.num_kv_heads)
    outputs = [
        tensor(np.full((*shape, width), np.nan, spec.kv_dtype))
        for width in (spec.qk_head_dim, spec.v_head_dim)
    ]
    compiled("debug_get_kv", spec)(actual, tensor(at, 3), *outputs, 1)
    for output, rows in zip(outputs, reference.gather_slots(want, at), strict=True):
        found = output.numpy()
        assert np.isnan(found[0]).all()
        reference.assert_same_bits(found[1], np.ascontiguousarray(rows[..., : found.shape[-1]]))
