# SPDX-License-Identifier: Apache-2.0
"""Decode over quantized pages for CPUs with AVX2, which multiplies codes as words."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels import build_kernel
from tir_kernels.cpu.rows.products import has_word_products
from tvm_pagedkv.compiler import compile_kernel, resolve_target, vector_target

from ..reference import quantized
from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    DECODE_BATCHES,
    F16,
    F32,
    make_spec,
    needs_cpu,
    parametrize_seed,
)

CPU = "x86-64-v3"
LENGTHS = [*DECODE_BATCHES["mixed"], *DECODE_BATCHES["long"]]
SHAPES = {
    "int8": ((8, 2), 128, (F16, "int8"), 16),
    "int8-80-p2": ((3, 3), 80, (F32, "int8"), 2),
    "int4": ((8, 2), 128, (BF16, "int4"), 16),
    "int4-96-p1": ((5, 1), 96, (F32, "int4"), 1),
    "int8,int4": ((4, 4), 64, (F32, "int8,int4"), 32),
    "int4,int8": ((12, 1), 64, (F16, "int4,int8"), 64),  # three sets of rows
    "int8-256": ((2, 1), 256, (F32, "int8"), 8),
    "int4-64-p4": ((3, 3), 64, (F16, "int4"), 4),
    "int4-256": ((7, 1), 256, (F32, "int4"), 8),  # two sets of rows, one of them padded
}


def _spec(name: str, **fields):
    spec = make_spec(*SHAPES[name], target=vector_target(CPU), **fields)
    assert has_word_products(spec)
    return spec


@needs_cpu(CPU)
@pytest.mark.parametrize("name", SHAPES)
@parametrize_seed
def test_decode(name, seed):
    case = PagedBatch(_spec(name), LENGTHS, seed)
    case.decode(CPU)
    case.verify()


@needs_cpu(CPU)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_codes(sign):
    """Sums of products of bytes have 16 bits: those of 32 columns have to fit."""
    spec = _spec("int4-256")
    case = PagedBatch(spec, [(1, 40), (1, 70)], 0)
    largest = np.full(spec.qk_head_dim, 7.0, np.float32)
    largest[:: spec.codec.group_size] = -8  # which decides the scale
    rows = quantized.rotate(spec.codec, np.stack([largest, sign * np.ones_like(largest)]), 256)
    case.pages = np.where(np.isnan(case.pages), np.nan, rows[0])
    case.q[:] = rows[1]
    case.decode(CPU)
    case.verify()


@needs_cpu(CPU)
@pytest.mark.parametrize("window", [33, 100])
@parametrize_seed
def test_windows(window, seed):
    case = PagedBatch(_spec("int4", kind="mha_sliding"), LENGTHS, seed)
    case.decode(CPU, window=window)
    case.verify(window=window)


@needs_cpu(CPU)
@parametrize_seed
def test_rotated_inside(seed):
    """K that is rotated in the kernel is multiplied as float32, V as words."""
    case = PagedBatch(_spec("int8"), LENGTHS, seed)
    case.decode(CPU, inline=True)
    case.verify(inline=True)


@needs_cpu(CPU)
@parametrize_seed
def test_single_rows_among_others(seed):
    case = PagedBatch(_spec("int4"), BATCHES["mixed"], seed)
    case.prefill(cpu=CPU)
    case.verify()


@needs_cpu(CPU)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_row_that_is_not_finite_shows(value):
    spec = _spec("int8")
    case = PagedBatch(spec, [(1, 40), (1, 70)], 0)
    case.q[1, 3, 5] = value
    case.decode(CPU)
    o = case.o.numpy().astype(np.float32)
    assert np.isnan(o[1, 3]).all()
    assert np.isfinite(o[0]).all() and np.isfinite(np.delete(o[1], 3, axis=0)).all()


@needs_cpu(CPU)
@pytest.mark.parametrize(
    "name, more, instruction",
    [
        ("int8", [], "vpmaddwd"),
        ("int8", ["+avxvnni", "+fast-dpwssd"], "vpdpwssd"),
        ("int4", [], "vpmaddubsw"),
    ],
)
def test_instructions(name, more, instruction):
    target = resolve_target({"kind": "llvm", "mcpu": CPU, "mattr": more})
    spec = make_spec(*SHAPES[name], target=vector_target(target))
    assert has_word_products(spec)
    assembly = compile_kernel(build_kernel("decode", spec), "decode", target).inspect_source("s")
    assert assembly.count(instruction) >= 64


@needs_cpu(CPU)
def test_pages_that_are_widened_to_float32():
    avx2 = vector_target(CPU)
    for shape in (((4, 2), 64, (F16, "int5")), ((4, 2), 72, (F16, "int8")), ((4, 2), 64)):
        assert not has_word_products(make_spec(*shape, target=avx2))
    for cpu in ("znver4", "x86-64"):
        assert not has_word_products(make_spec(*SHAPES["int8"], target=vector_target(cpu)))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
