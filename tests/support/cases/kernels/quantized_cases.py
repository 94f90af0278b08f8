# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels that move rows of quantized pages, for specs of any target.

Codes and scales are compared bit for bit where the kernel's arithmetic is that of the reference:
rows that are neither rotated nor multiplied with Hadamard matrices. Otherwise rounding of the last
bit may move a value across the middle between two codes, or a scale by one step.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tir_kernels.layout import page_bytes, rows_per_slot
from tir_kernels.spec import KernelSpec

from .... import reference
from ....reference import quantized
from .attention_cases import compiled, normal, tensor, tensors_for
from .quantized_pages import (
    GARBAGE,
    page_parts,
    pool,
    read_rows,
    rows_of_planes,
    slot_parts,
    write_rows,
)

REORDERED = 2e-6  # how far sums in another order move a value, relative to the row
CODECS = ("int8", "float8_e4m3fn", "int5", "int4")


def hostile_rows(rng, shape, dtype: str) -> np.ndarray:
    """Rows with zeros, subnormal and huge numbers, infinities and NaN among normal ones."""
    rows = normal(rng, shape, dtype).astype(np.float32)
    info, columns = ml_dtypes.finfo(np.dtype(dtype)), np.arange(shape[-1])
    huge, tiny = float(info.max) / 16, float(info.smallest_subnormal)  # sums of the huge are finite
    special = (
        lambda row: 0 * row,
        lambda row: np.full_like(row, -0.0),
        lambda row: tiny * np.sign(row),
        lambda row: row * (huge / np.abs(row).max()),
        lambda row: row * 1e-37,
        lambda row: row * 3e-6,
        lambda row: np.where(columns == 3, np.nan, row),
        lambda row: np.where(columns == row.size - 1, -np.inf, row),
        lambda row: np.where(columns == 1, 1e4 * row, row),
        lambda row: np.where(columns % 2, -1.0, 1.0),
    )
    flat = rows.reshape(-1, shape[-1])
    for row, change in zip(flat[:: max(1, len(flat) // len(special))], special, strict=False):
        row[:] = change(row)
    return rows.astype(dtype)


def static_scales(rng, spec: KernelSpec) -> list[np.ndarray]:
    """The last argument of what appends, float32 ``[2, Hk]``; nothing where there is none.

    Some of the values of a normal row do not fit.
    """
    if not spec.static_scales:
        return []
    shape, limits = (2, spec.num_kv_heads), [[spec.codec.k.limit], [spec.codec.v.limit]]
    return [(rng.uniform(0.5, 4, shape) / limits).astype(np.float32)]


def assert_rows_kept(
    spec: KernelSpec,
    pages: np.ndarray,
    slots,
    rows: np.ndarray,
    *,
    is_exact: bool,
    static: list[np.ndarray] | None = None,
) -> None:
    """Compare the codes and scales of slots with those of rows ``[n, rows_per_slot, width]``."""
    planes = slot_parts(spec, pages, slots)
    given = np.split(static[0].reshape(1, -1), len(planes), 1) if static else [None] * len(planes)
    for (codec, codes, scales), own, of_rows in zip(
        planes, rows_of_planes(spec, rows), given, strict=True
    ):
        _assert_plane_kept(spec, codec, (codes, scales), own, of_rows, is_exact=is_exact)


def _assert_plane_kept(
    spec: KernelSpec, codec, kept: tuple, rows, static=None, *, is_exact: bool
) -> None:
    codes, scales = kept
    rotated = quantized.rotate(codec, rows, spec.v_head_dim)
    want_codes, want_scales = quantized.quantize(codec, rotated, spec.v_head_dim, static)
    if is_exact and not codec.has_hadamard:
        np.testing.assert_array_equal(scales, want_scales)
        np.testing.assert_array_equal(codes, want_codes)
        return
    known = np.isfinite(want_scales)
    np.testing.assert_array_equal(np.isnan(scales), ~known)
    width = spec.qk_head_dim
    step = 2.0**-6 if codec.scale_dtype == "bfloat16" else REORDERED
    # Where a rotation leaves next to nothing of a group, that is rounding, and so are its codes.
    size = np.abs(np.where(np.isfinite(rotated), rotated, 0)).max(-1, keepdims=True)
    rest = REORDERED * size / abs(codec.limit)
    wrong = np.abs(scales - want_scales) > step * np.abs(want_scales) + rest
    assert not wrong[known].any()
    is_compared = known & (np.abs(want_scales) > 1e3 * rest)
    if codec.scale_dtype == "bfloat16":
        # Where the largest value is in the middle between two scales, the codes differ, and with
        # them the scale that is fitted to them: by several steps, but rarely.
        assert (scales != want_scales)[is_compared].sum() <= 2 + is_compared.sum() // 50
    # A code may be the neighbour of the right one, where the value is in the middle between both.
    finest, steps = (2.0**-9, 8) if codec.name == "float8_e4m3fn" else (1.0, np.inf)
    gap = np.maximum(finest, np.abs(want_codes) / steps)
    columns = np.concatenate(
        [
            np.full(end - begin, g)
            for g, (begin, end) in enumerate(codec.groups(width, spec.v_head_dim))
        ]
    )
    differs = (codes != want_codes) & is_compared[..., columns]
    assert (np.abs(codes - want_codes)[differs] <= gap[differs]).all()
    assert differs.sum() <= 2 + codes.size // 100


def check_transpose_append(spec: KernelSpec, num_rows: int, seed: int, cpu: str = "native") -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    num_pages = -(-num_rows // spec.page_size) + 3
    shape = (num_rows, spec.num_kv_heads, spec.qk_head_dim)
    k, v = (hostile_rows(rng, shape, spec.dtype) for _ in range(2))
    slots = rng.permutation(num_pages * spec.page_size)[:num_rows].astype(np.int32)
    slots[1::5] = -1
    pages = tensors_for(spec)(pool(spec, num_pages))
    static = static_scales(rng, spec)
    arrays = [tensor(x) for x in (k, v, slots, *static)]
    compiled("transpose_append", spec, cpu)(pages, *arrays)
    rows = (
        np.stack([k, v], 1)
        .astype(np.float32)
        .reshape(num_rows, rows_per_slot(spec), spec.qk_head_dim)
    )
    is_kept = slots >= 0
    assert_rows_kept(
        spec, pages.numpy(), slots[is_kept], rows[is_kept], is_exact=True, static=static
    )
    assert_others_untouched(spec, pages.numpy(), slots[is_kept])


def assert_others_untouched(spec: KernelSpec, pages: np.ndarray, slots) -> None:
    """Check that slots that were not written, and padding, hold what `pool` has put there."""
    page, offset = slots // spec.page_size, slots % spec.page_size
    rest = pages.copy()
    for part in page_parts(spec, rest):
        view = part.view(np.uint8)
        view[page, ..., offset, :] = GARBAGE
    assert (rest == GARBAGE).all()


def check_rope_append(
    spec: KernelSpec, num_rows: int, apply_rope: int, seed: int, cpu: str = "native"
) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    num_qo, num_kv = spec.num_qo_heads, spec.num_kv_heads
    num_pages = -(-num_rows // spec.page_size) + 3
    qkv = normal(rng, (num_rows, num_qo + 2 * num_kv, spec.qk_head_dim), spec.dtype)
    positions = rng.integers(0, 131072, num_rows).astype(np.int32)
    slots = rng.permutation(num_pages * spec.page_size)[:num_rows].astype(np.int32)
    slots[2::7] = -1
    q_out = tensor(np.full((num_rows, num_qo, spec.qk_head_dim), np.nan, spec.dtype))
    pages = tensors_for(spec)(pool(spec, num_pages))
    indptr = np.array([0, num_rows // 3, num_rows], np.int32)
    arrays = [tensor(x) for x in (qkv, indptr, positions, slots)]
    static = static_scales(rng, spec)
    compiled("rope_append", spec, cpu)(*arrays, q_out, pages, apply_rope, *map(tensor, static))
    q, k, v = np.split(qkv.astype(np.float32), [num_qo, num_qo + num_kv], axis=1)
    if apply_rope:
        rope = reference.Rope(rotary_dim=spec.rope.rotary_dim)
        q, k = (reference.rotate(x, positions, rope) for x in (q, k))
    reference.assert_close(q_out.numpy(), q, spec.dtype, "q")
    rows = np.concatenate([k, v], 1)
    is_kept = slots >= 0
    assert_rows_kept(
        spec, pages.numpy(), slots[is_kept], rows[is_kept], is_exact=not apply_rope, static=static
    )
    assert_others_untouched(spec, pages.numpy(), slots[is_kept])


def check_transpose_append_mla(spec: KernelSpec, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    num_pages = -(-num_rows // spec.page_size) + 3
    kv = hostile_rows(rng, (num_rows, spec.qk_head_dim), spec.dtype)
    slots = rng.permutation(num_pages * spec.page_size)[:num_rows].astype(np.int32)
    slots[1::5] = -1
    pages = tensors_for(spec)(pool(spec, num_pages))
    compiled("transpose_append_mla", spec)(pages, tensor(kv), tensor(slots))
    is_kept = slots >= 0
    rows = kv.astype(np.float32)[is_kept, None]
    assert_rows_kept(spec, pages.numpy(), slots[is_kept], rows, is_exact=True)
    assert_others_untouched(spec, pages.numpy(), slots[is_kept])


def random_pages(rng, spec: KernelSpec, num_pages: int) -> np.ndarray:
    """Pages of random bytes."""
    return rng.integers(0, 256, (num_pages, page_bytes(spec)), dtype=np.uint8)


def check_copies(spec: KernelSpec, seed: int) -> None:
    """Copy pages, single pages and slots: codes and scales move as they are."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")

    def copy(pages, source, destination) -> None:
        """Copy slots, given as (page, offset)."""
        for part in page_parts(spec, pages):
            part = part.view(np.uint8)
            part[destination[0], ..., destination[1], :] = part[source[0], ..., source[1], :]

    pages = random_pages(rng, spec, 43)
    actual, length = tensors_for(spec)(pages), spec.page_size // 2
    compiled("copy_single_page", spec)(actual, 3, 1, length)
    copy(pages, (3, np.arange(length)), (1, np.arange(length)))
    np.testing.assert_array_equal(actual.numpy(), pages)

    pairs = rng.permutation(43).reshape(-1)[:40].reshape(2, 20)
    copies = np.stack([*pairs, rng.integers(0, spec.page_size + 1, 20)]).astype(np.int32)
    actual = tensors_for(spec)(pages)
    compiled("copy_pages", spec)(actual, tensor(copies))
    for source, destination, length in copies.T:
        copy(pages, (source, np.arange(length)), (destination, np.arange(length)))
    np.testing.assert_array_equal(actual.numpy(), pages)

    slots = rng.integers(0, 43 * spec.page_size, (2, 50)).astype(np.int32)
    indptr = np.array([0, 0, 20, 50], np.int32)
    actual = tensors_for(spec)(pages)
    compiled("compact_copy", spec)(actual, tensor(indptr), tensor(slots), 3)
    for pair in slots.T:
        source, destination = (([slot // spec.page_size], [slot % spec.page_size]) for slot in pair)
        copy(pages, source, destination)
    np.testing.assert_array_equal(actual.numpy(), pages)


def check_debug_get_kv(spec: KernelSpec, num_rows: int, seed: int, cpu: str = "native") -> None:
    """Read rows back: within rounding of what the codes stand for."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    num_pages, is_latent = -(-num_rows // spec.page_size) + 3, spec.kind == "mla"
    slots = rng.permutation(num_pages * spec.page_size)[:num_rows].astype(np.int32)
    pages, width = pool(spec, num_pages), spec.qk_head_dim
    rows = hostile_rows(rng, (num_rows, rows_per_slot(spec), width), "float32")
    rows = np.clip(rows, -1e4, 1e4)  # infinities become numbers; float16 has room for all
    write_rows(spec, pages, slots, rows)
    shape = (3, num_rows, width) if is_latent else (3, num_rows, spec.num_kv_heads, width)
    sinks = [tensor(np.full(shape, 7, spec.dtype)) for _ in range(1 if is_latent else 2)]
    name = "debug_get_kv_mla" if is_latent else "debug_get_kv"
    compiled(name, spec, cpu)(tensors_for(spec)(pages), tensor(slots), *sinks, 1)
    expected = read_rows(spec, pages, slots).reshape(num_rows, len(sinks), *shape[2:])
    for n, sink in enumerate(sinks):
        found = sink.numpy().astype(np.float32)
        assert (found[[0, 2]] == 7).all()
        want = expected[:, n]
        if spec.codec.has_hadamard:
            reference.assert_close(found[1], want, spec.dtype)
        else:
            np.testing.assert_array_equal(found[1], want.astype(spec.dtype).astype(np.float32))
