# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels that move rows against the reference, for specs of any target.

Every tensor lies at an odd place in a larger allocation, unused slots hold NaN, and what a kernel
must not write is compared bit for bit.
"""

from __future__ import annotations

import itertools

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm

from tir_kernels.spec import KernelSpec

from .... import reference
from .attention_cases import compiled, normal, tensors_for


def unaligned_tensor(array: np.ndarray, shift: int = 1):
    """`array` as a tensor whose data start at element `shift` of a larger allocation."""
    array = np.asarray(array)
    backing = np.zeros(array.size + shift, array.dtype)
    backing[shift:] = array.reshape(-1)
    whole = tvm.runtime.tensor(backing)
    return whole._create_view(array.shape, str(array.dtype), shift * array.dtype.itemsize)


def empty_pages(spec: KernelSpec, num_pages: int) -> np.ndarray:
    shape = (num_pages, 2, spec.num_kv_heads, spec.page_size, spec.qk_head_dim)
    return np.full(shape, np.nan, spec.kv_dtype)


def shuffled_slots(rng, spec: KernelSpec, num_rows: int, num_pages: int) -> np.ndarray:
    return rng.permutation(num_pages * spec.page_size)[:num_rows].astype(np.int32)


def pages_for(spec: KernelSpec, num_rows: int) -> int:
    return -(-num_rows // spec.page_size) + 3


def assert_pages(actual, expected, slots, dtype: str) -> None:
    """Written slots close to the reference, all others untouched."""
    assert np.isnan(np.asarray(actual, np.float32)).sum() == np.isnan(expected).sum()
    for got, want in zip(
        *(reference.gather_slots(p, slots) for p in (actual, expected)), strict=True
    ):
        reference.assert_close(got, want, dtype)


def check_transpose_append(spec, num_rows, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    num_pages = pages_for(spec, num_rows)
    k, v = (
        normal(rng, (num_rows, spec.num_kv_heads, spec.qk_head_dim), spec.dtype) for _ in range(2)
    )
    slots = shuffled_slots(rng, spec, num_rows, num_pages)
    slots[1::5] = -1
    pages = tensor(empty_pages(spec, num_pages))
    compiled("transpose_append", spec)(pages, tensor(k), tensor(v), tensor(slots, 3))
    reference.assert_same_bits(
        pages.numpy(), reference.append(empty_pages(spec, num_pages), k, v, slots)
    )


def check_split_rotary(spec, num_rows, apply_rope, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    qkv, positions, expected = fused(rng, spec, num_rows)
    q, k, v = (tensor(np.full(x.shape, np.nan, spec.dtype)) for x in expected)
    compiled("split_rotary", spec)(tensor(qkv), tensor(positions, 5), q, k, v, apply_rope)
    if apply_rope:
        rope = reference.Rope(rotary_dim=spec.qk_head_dim)
        for actual, want in ((q, expected[0]), (k, expected[1])):
            rotated = reference.rotate(want, positions, rope)
            reference.assert_close(actual.numpy(), rotated, spec.dtype)
    else:
        reference.assert_same_bits(q.numpy(), expected[0])
        reference.assert_same_bits(k.numpy(), expected[1])
    reference.assert_same_bits(v.numpy(), expected[2])


def check_merge(spec, num_rows, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    num_rows = min(num_rows, 40_000_000 // (spec.num_qo_heads * spec.v_head_dim * 10))
    shape = (num_rows, spec.num_qo_heads, spec.v_head_dim)
    o, o_other = normal(rng, shape, spec.dtype), normal(rng, shape, spec.dtype)
    lse, lse_other = (rng.uniform(-30, 30, shape[:2]).astype(np.float32) for _ in range(2))
    lse_other[5:9] = lse[5:9] + 1e-3
    nothing = rng.random((2, *shape[:2])) < 0.2  # parts that saw nothing; a few rows have two
    lse[nothing[0]], lse_other[nothing[1]] = -np.inf, -np.inf
    want_o, want_lse = reference.merge(o, lse, o_other, lse_other)
    o[nothing[0]], o_other[nothing[1]] = np.nan, np.nan  # what they hold counts for nothing
    actual_o, actual_lse = tensor(o), tensor(lse)
    compiled("merge", spec)(actual_o, actual_lse, tensor(o_other), tensor(lse_other))
    found = actual_o.numpy(), actual_lse.numpy()
    reference.assert_state_close(found, (want_o, want_lse), spec.dtype)


def check_copy_single_page(spec, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    for length in sorted({0, 1, spec.page_size // 2, spec.page_size - 1, spec.page_size}):
        pages = normal(rng, empty_pages(spec, 5).shape, spec.kv_dtype)
        pages[3, :, :, length:] = np.nan
        actual = tensor(pages)
        compiled("copy_single_page", spec)(actual, 3, 1, length)
        pages[1, :, :, :length] = pages[3, :, :, :length]
        reference.assert_same_bits(actual.numpy(), pages, f"length {length}")


def check_copy_pages(spec, num_copies, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    pages = normal(rng, empty_pages(spec, 2 * num_copies + 3).shape, spec.kv_dtype)
    some = rng.permutation(len(pages))[: 2 * num_copies]
    copies = np.stack([*some.reshape(2, -1), rng.integers(0, spec.page_size + 1, num_copies)])
    copies[0, 1::3] = copies[0, :1]  # a page may be copied several times
    actual = tensor(pages)
    compiled("copy_pages", spec)(actual, tensor(copies.astype(np.int32), 3))
    for source, destination, length in copies.T:
        pages[destination, ..., :length, :] = pages[source, ..., :length, :]
    reference.assert_same_bits(actual.numpy(), pages)


def check_debug_get_kv(spec, num_rows, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    num_pages, num_layers, layer = pages_for(spec, num_rows), 3, 1
    pages = normal(rng, empty_pages(spec, num_pages).shape, spec.kv_dtype)
    slots = shuffled_slots(rng, spec, num_rows, num_pages)
    shape = (num_layers, num_rows, spec.num_kv_heads, spec.qk_head_dim)
    k, v = (tensor(np.full(shape, np.nan, spec.kv_dtype)) for _ in range(2))
    compiled("debug_get_kv", spec)(tensor(pages), tensor(slots, 3), k, v, layer)
    for actual, rows in zip((k, v), reference.gather_slots(pages, slots), strict=True):
        want = np.full(shape, np.nan, spec.kv_dtype)
        want[layer] = rows
        reference.assert_same_bits(actual.numpy(), want)


def check_compact_copy(spec, num_copies, seed) -> None:
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    pages = normal(rng, empty_pages(spec, pages_for(spec, 100)).shape, spec.kv_dtype)
    num_slots = pages.shape[0] * spec.page_size
    slots = rng.integers(0, num_slots, (2, num_copies)).astype(np.int32)  # chains and repeats
    indptr = np.array([0, 0, num_copies // 3, num_copies, num_copies], np.int32)
    actual = tensor(pages)
    compiled("compact_copy", spec)(actual, tensor(indptr, 3), tensor(slots), len(indptr) - 1)
    for source, destination in slots.T:
        k, v = reference.gather_slots(pages, np.array([source]))
        pages = reference.append(pages, k, v, np.array([destination]))
    reference.assert_same_bits(actual.numpy(), pages)


def fused(rng, spec: KernelSpec, num_rows: int):
    """Fused rows, positions, and the parts Q, K, V."""
    num_qo, num_kv = spec.num_qo_heads, spec.num_kv_heads
    qkv = normal(rng, (num_rows, num_qo + 2 * num_kv, spec.qk_head_dim), spec.dtype)
    positions = rng.integers(0, 131072, num_rows).astype(np.int32)
    return qkv, positions, np.split(qkv, [num_qo, num_qo + num_kv], axis=1)


def check_rope_append(
    spec, rope, qkv, positions, lengths, apply_rope=1, cpu="native", seed=0
) -> None:
    """Run `rope_append` on a batch and compare q and the pages; the last rows keep no K and V."""
    tensor = tensors_for(spec, unaligned_tensor)
    rng = np.random.default_rng(seed)
    num_rows, num_pages = len(qkv), pages_for(spec, len(qkv))
    slots = shuffled_slots(rng, spec, num_rows, num_pages)
    slots[2::7] = -1
    query_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v = np.split(qkv, [spec.num_qo_heads, spec.num_qo_heads + spec.num_kv_heads], axis=1)
    if apply_rope:
        parts = [slice(a, b) for a, b in itertools.pairwise(query_indptr) if a < b]
        q, k = (
            np.concatenate([reference.rotate(x[p], positions[p], rope) for p in parts])
            if parts
            else x
            for x in (q, k)
        )
    expected = reference.append(empty_pages(spec, num_pages), k, v, slots)
    q_out = tensor(np.full(q.shape, np.nan, spec.dtype))
    pages = tensor(empty_pages(spec, num_pages))
    factors = []
    if spec.rope.kind == "longrope":
        scaling = rope.scaling
        both = (*scaling["long_factor"], *scaling["short_factor"])
        factors = [tensor(np.array(both, np.float32))]
    compiled("rope_append", spec, cpu)(
        tensor(qkv),
        tensor(query_indptr, 3),
        tensor(positions, 2),
        tensor(slots, 7),
        q_out,
        pages,
        apply_rope,
        *factors,
    )
    coarsest = reference.coarsest(spec.dtype, spec.kv_dtype)
    reference.assert_close(q_out.numpy(), q, spec.dtype, "q")
    assert_pages(pages.numpy(), expected, slots[slots >= 0], coarsest)
    written_v = reference.gather_slots(pages.numpy(), slots[slots >= 0])[1]
    reference.assert_same_bits(written_v, v[slots >= 0].astype(spec.kv_dtype), "v")
