# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions over rows in pages, against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tvm.testing
import tvm_ffi

from tir_kernels import build_kernel, kernel_names
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.script import read_by_tvm
from tvm_pagedkv.compiler.build import vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import compiled, normal, tensor
from ..support.cases.kernels.conv_cases import SHAPES, check_conv
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, parametrize_cpu, parametrize_seed
from ..support.cases.kernels.recurrent_moves import check_compact_copy, check_copy_pages


def make_spec(shape: str, dtype: str = F32, cpu: str = "native", page: int = 4) -> ConvSpec:
    channels, width, activation, has_bias = SHAPES[shape]
    return ConvSpec(channels, width, dtype, activation, has_bias, page, vector_target(cpu))


@parametrize_seed
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype, seed):
    spec = make_spec(shape, dtype)
    for num_tokens in (0, 1, 5, 150):
        check_conv(spec, num_tokens, seed)


@parametrize_cpu("x86-64-v2", "haswell", "x86-64-v4")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_other_cpus(dtype, cpu):
    check_conv(make_spec("140x2-silu-bias", dtype, cpu), 9, 0, cpu)
    check_conv(make_spec("72x5-silu", dtype, cpu), 9, 0, cpu)


def test_many_threads():
    """Enough bytes for several threads; a token has the same bits as it has alone."""
    spec, rng = make_spec("1040x3-bias", BF16), np.random.default_rng(0)
    x = normal(rng, (300, spec.channels), BF16)
    weight = normal(rng, (spec.channels, spec.width), BF16)
    bias = normal(rng, (spec.channels,), BF16)
    pages = x.reshape(75, 4, spec.channels)
    slots = np.int32([[t - 2, t - 1] if t > 1 else [-1, t - 1] for t in range(300)])
    found = []
    for tokens in (slice(0, 300), slice(299, 300), slice(1, 2)):
        out = tensor(np.full(x[tokens].shape, np.nan, BF16))
        arrays = (x[tokens], pages, slots[tokens], weight, bias)
        compiled("causal_conv", spec)(*map(tensor, arrays), out)
        found.append(out.numpy())
    reference.assert_same_bits(found[1], found[0][299:])
    reference.assert_same_bits(found[2], found[0][1:2])


def test_copies_of_rows():
    spec = make_spec("140x2-silu-bias", F16)
    check_copy_pages(spec, 4, 0)
    check_compact_copy(spec, 20, 0)


def test_a_set_has_all_kernels():
    spec = make_spec("7x8")
    names = ["row_append", "causal_conv", "copy_single_page", "copy_pages", "compact_copy"]
    assert kernel_names(spec) == [*names, "debug_get_kv_mla"]
    with pytest.raises(ValueError, match="no kernel 'decode'; there are row_append, "):
        build_kernel("decode", spec)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_both_readers_of_tvmscript_agree(shape):
    spec = make_spec(shape)
    own = build_kernel("causal_conv", spec)
    with read_by_tvm():
        of_tvm = build_kernel("causal_conv", spec)
    assert tvm_ffi.structural_equal(own, of_tvm, map_free_vars=True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"width": 1}, "width must be from 2 to 8, got 1"),
        ({"width": 9}, "width must be from 2 to 8, got 9"),
        ({"channels": 0}, "channels must be positive, got 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"activation": "relu"}, "activation must be one of silu or None, got 'relu'"),
    ],
)
def test_specs_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        ConvSpec(**({"channels": 8, "width": 4} | fields))


if __name__ == "__main__":
    tvm.testing.main()
