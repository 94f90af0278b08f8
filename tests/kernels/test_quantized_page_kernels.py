# SPDX-License-Identifier: Apache-2.0
"""Kernels that move rows of quantized pages, against the specification of the codecs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tir_kernels import build_kernel
from tir_kernels.codec import codec_of
from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from ..reference import quantized
from ..support.cases.kernels.attention_cases import compiled
from ..support.cases.kernels.attention_cases import tensor as place
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, make_spec, parametrize_cpu
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.quantized_cases import (
    CODECS,
    check_copies,
    check_debug_get_kv,
    check_rope_append,
    check_transpose_append,
    check_transpose_append_mla,
)
from ..support.cases.kernels.quantized_pages import page_parts, pool
from ..support.harness.selections import latin_square

parametrize_codecs = pytest.mark.parametrize("codec", CODECS)
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
parametrize_dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16])
# Heads, head dims and page sizes; a rotation of some columns only; a block of 32 that repeats.
SHAPES = {
    "32:8x128-p16": ((32, 8), 128, 16, {}),
    "4:2x96-p1": ((4, 2), 96, 1, {}),
    "3:1x64-p4-partial": ((3, 1), 64, 4, {"rope": RopeSpec(rotary_dim=20)}),
    "2:2x256-p256": ((2, 2), 256, 256, {}),
    "1:1x576-p2": ((1, 1), 576, 2, {}),
}
NARROW = {"2:2x8-p8": ((2, 2), 8, 8, {}), "5:5x104-p16": ((5, 5), 104, 16, {})}
parametrize_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def quantized_spec(shape, dtype: str, codec: str, **fields):
    heads, dim, page, more = shape
    return make_spec(heads, dim, (dtype, codec), page, **more, **fields)


@latin_square(8, "shape", "dtype", "codec")
@parametrize_seed
@pytest.mark.parametrize("num_rows", [0, 1, 700])
@parametrize_codecs
@parametrize_dtypes
@parametrize_shapes
def test_append_quantizes(shape, dtype, codec, num_rows, seed):
    check_transpose_append(quantized_spec(shape, dtype, codec), num_rows, seed)


@latin_square(8, "shape", "dtype", "codec")
@parametrize_seed
@pytest.mark.parametrize("apply_rope", [0, 1])
@parametrize_codecs
@parametrize_dtypes
@parametrize_shapes
def test_rope_append_quantizes(shape, dtype, codec, apply_rope, seed):
    check_rope_append(quantized_spec(shape, dtype, codec), 150, apply_rope, seed)


@parametrize_seed
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", NARROW.values(), ids=NARROW)
def test_rows_of_any_width(shape, codec, seed):
    spec = quantized_spec(shape, F16, codec)
    check_transpose_append(spec, 60, seed)
    check_rope_append(spec, 60, 1, seed)
    check_debug_get_kv(spec, 60, seed)


@latin_square(4, "cpu", "dtype", "codec")
@parametrize_seed
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3fn", "float8_e4m3fn,int8"])
@parametrize_cpu("x86-64-v4", "x86-64-v3", "x86-64")
@parametrize_dtypes
def test_static_scales(dtype, cpu, codec, seed):
    """Scales of heads, of some of whose values none is so large; of rows with NaN there is none."""
    for name in ("4:2x96-p1", "3:1x64-p4-partial", "32:8x128-p16"):
        shape = SHAPES[name]
        spec = quantized_spec(shape, dtype, codec, target=vector_target(cpu), static_scales=True)
        if shape[2] > 1 or "," not in codec:
            check_transpose_append(spec, 60, seed, cpu)
            check_rope_append(spec, 40, 0, seed, cpu)
            check_rope_append(spec, 40, 1, seed, cpu)


@latin_square(4, "cpu", "dtype", "codec")
@parametrize_seed
@parametrize_codecs
@parametrize_cpu("x86-64-v4", "x86-64-v3", "x86-64")
@parametrize_dtypes
def test_append_for_other_cpus(dtype, cpu, codec, seed):
    spec = quantized_spec(SHAPES["4:2x96-p1"], dtype, codec, target=vector_target(cpu))
    check_transpose_append(spec, 40, seed, cpu)
    check_rope_append(spec, 40, 1, seed, cpu)
    check_debug_get_kv(spec, 40, seed, cpu)


@parametrize_codecs
def test_the_bits_of_codes_lie_where_the_codec_says(codec):
    codec = codec_of(codec)
    bits = np.random.default_rng(0).integers(0, 1 << codec.bits, (3, 192)).astype(np.uint8)
    packed = quantized.code_bytes(codec, bits + np.float32(codec.lowest))
    data = packed if codec.is_packed else bits
    assert data.shape[-1] == codec.row_bytes(192)
    unpacked = np.zeros_like(bits)
    codec.unpack(data, unpacked)
    np.testing.assert_array_equal(unpacked, bits)


@latin_square(4, "shape", "codec")
@parametrize_seed
@parametrize_codecs
@parametrize_shapes
def test_copies_move_codes_and_scales(shape, codec, seed):
    check_copies(quantized_spec(shape, F16, codec), seed)


@latin_square(8, "shape", "dtype", "codec")
@parametrize_seed
@pytest.mark.parametrize("num_rows", [0, 1, 700])
@parametrize_codecs
@parametrize_dtypes
@parametrize_shapes
def test_debug_get_kv_dequantizes(shape, dtype, codec, num_rows, seed):
    check_debug_get_kv(quantized_spec(shape, dtype, codec), num_rows, seed)


@latin_square(6, "dims", "dtype", "codec")
@parametrize_seed
@parametrize_codecs
@parametrize_dtypes
@pytest.mark.parametrize("dims", [(512, 64), (64, 32)], ids=lambda dims: f"{dims[0]}+{dims[1]}")
def test_latent_rows(dims, dtype, codec, seed):
    spec = make_mla_spec(4, dims, (dtype, codec), 8)
    check_transpose_append_mla(spec, 70, seed)
    check_copies(spec, seed)
    check_debug_get_kv(spec, 70, seed)


@parametrize_cpu("x86-64-v4", "x86-64-v3", "x86-64")
def test_every_float8_code_is_chosen_and_read_exactly(cpu):
    """Rows of all finite codes with the scale 1 come back bit for bit."""
    spec = make_spec((1, 1), 256, (F32, "float8_e4m3fn"), 2, target=vector_target(cpu))
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.nan_to_num(numbers, nan=448.0)[None, None]
    pages = place(pool(spec, 1))
    slot = place(np.array([1], np.int32))
    compiled("transpose_append", spec, cpu)(pages, place(numbers), place(numbers[..., ::-1]), slot)
    codes, scales = page_parts(spec, pages.numpy())
    assert (scales[0, :, 0, 1] == 1).all()
    np.testing.assert_array_equal(quantized.codes_of(spec.codec, codes[0, 0, 0, 1]), numbers[0, 0])
    k, v = (place(np.zeros((1, 1, 1, 256), np.float32)) for _ in range(2))
    compiled("debug_get_kv", spec, cpu)(pages, slot, k, v, 0)
    np.testing.assert_array_equal(k.numpy()[0, 0, 0], numbers[0, 0])
    np.testing.assert_array_equal(v.numpy()[0, 0, 0], numbers[0, 0, ::-1])


@pytest.mark.parametrize("codec", ["int5", "int4"])
def test_rows_that_no_groups_fit_are_refused(codec):
    spec = make_spec((2, 2), 80, (F16, codec))
    with pytest.raises(ValueError, match="multiples of 32, got 80; choose 'int8'"):
        build_kernel("transpose_append", spec)
