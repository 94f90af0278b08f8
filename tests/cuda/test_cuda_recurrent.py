# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs of recurrent layers and convolutions, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import tvm.testing

from tir_kernels import kernel_names
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tir_kernels.spec import CudaTarget, VectorTarget

from .. import reference
from ..support.cases.kernels.attention_cases import tensors_for
from ..support.cases.kernels.conv_cases import SHAPES as CONVOLUTIONS
from ..support.cases.kernels.conv_cases import check_conv
from ..support.cases.kernels.cuda_cases import BF16, F16, F32, on_gpu_too, parametrize_seed
from ..support.cases.kernels.recurrent_cases import (
    SHAPES,
    Tokens,
    assert_outputs_close,
    assert_states_close,
    check_sequences,
    check_tree,
    states_of,
)
from ..support.cases.kernels.recurrent_moves import (
    check_append,
    check_compact_copy,
    check_copy_pages,
    check_copy_single_page,
    check_debug_get_rows,
)
from ..support.emulators.cuda_emulator import SCHEDULES, schedule
from ..support.harness.selections import few_of, latin_square


def make_spec(
    rule: str, shape: str, dtype: str = F32, page: int = 4, state_dtype: str = F32
) -> RecurrentSpec:
    return RecurrentSpec(rule, *SHAPES[shape], dtype, page, CudaTarget(), state_dtype)


@parametrize_seed
@latin_square(6, "rule", "shape", "dtype")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
@on_gpu_too
def test_sequences_of_unequal_lengths(rule, shape, dtype, seed):
    check_sequences(make_spec(rule, shape, dtype), seed)


@parametrize_seed
@latin_square(6, "rule", "shape", "state_dtype")
@pytest.mark.parametrize("state_dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
@on_gpu_too
def test_states_are_rounded_after_each_token(rule, shape, state_dtype, seed):
    check_sequences(make_spec(rule, shape, BF16, state_dtype=state_dtype), seed)


@parametrize_seed
@pytest.mark.parametrize("rule", few_of(RULES, 2))
@on_gpu_too
def test_token_trees(rule, seed):
    check_tree(make_spec(rule, "3-heads-24x8"), seed, is_forest=True)


@parametrize_seed
@pytest.mark.parametrize(("rule", "state_dtype"), [("kda", F32), ("mamba2", F32), ("kda", BF16)])
@on_gpu_too
def test_a_state_has_the_same_bits_however_its_tokens_came(rule, state_dtype, seed):
    spec = make_spec(rule, "2-heads-64x256", BF16, state_dtype=state_dtype)
    rng = np.random.default_rng(seed)
    tokens, pool = Tokens.random(spec, 9, rng), states_of(spec, 4, rng)
    place = tensors_for(spec)
    whole, cut, replayed = (place(pool) for _ in range(3))
    segments = [(2, 0, 2), (6, 2, 3), (1, 3, 1)]
    o = tokens.run(whole, [(9, 0, 1)], [1], seed=seed)
    reference.assert_same_bits(tokens.run(cut, segments, [3], seed=seed + 1), o)
    reference.assert_same_bits(cut.numpy()[1], whole.numpy()[1])
    of_last = tokens.run(replayed, segments, [3], rows=[-1] * 8 + [0], seed=seed)
    reference.assert_same_bits(of_last[8:], o[8:])
    reference.assert_same_bits(replayed.numpy()[1:], cut.numpy()[1:])


def test_a_tree_under_each_schedule():
    spec = make_spec("gated_delta", "3-heads-24x8")
    for chosen in SCHEDULES:
        with schedule(chosen):
            check_tree(spec, 1, is_forest=False)


@on_gpu_too
def test_wide_keys():
    """A warp keeps eight columns of 256 rows."""
    spec = RecurrentSpec("gated_delta", 1, 1, 256, 16, BF16, 4, CudaTarget())
    rng = np.random.default_rng(0)
    tokens, pool = Tokens.random(spec, 5, rng), states_of(spec, 2, rng)
    states = tensors_for(spec)(pool)
    actual = tokens.run(states, [(5, 0, 1)], [1])
    o, expected = tokens.expected(pool[0])
    assert_outputs_close(actual, o, BF16)
    assert_states_close(states.numpy()[1], expected[-1])


@parametrize_seed
@pytest.mark.parametrize(
    "rule, shape, dtype, page",
    [
        ("gated_delta", "4-of-2-heads-128", BF16, 16),
        pytest.param("kda", "6-of-1-head-7x20", F16, 1, marks=pytest.mark.slow),
        ("kda", "3-heads-24x8", F32, 5),
        pytest.param("mamba2", "2-heads-64x256", BF16, 4, marks=pytest.mark.slow),
    ],
)
@on_gpu_too
def test_moves(rule, shape, dtype, page, seed):
    spec = make_spec(rule, shape, dtype, page)
    for count in (0, 1, 9):
        check_append(spec, count, seed)
    check_copy_single_page(spec, seed)
    check_copy_pages(spec, 5, seed)
    check_compact_copy(spec, 30, seed)
    check_debug_get_rows(spec, 9, seed)


@on_gpu_too
def test_rows_of_thousands_of_elements():
    """More runs of a row than a block has threads, eight times over."""
    spec = RecurrentSpec("kda", 32, 32, 64, 64, BF16, 2, CudaTarget())
    assert spec.row_width > 8 * 128 * 8
    check_append(spec, 3, 0)
    check_copy_pages(spec, 3, 0)
    check_compact_copy(spec, 5, 0)
    check_debug_get_rows(spec, 3, 0)


@parametrize_seed
@latin_square(3, "shape", "dtype")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", CONVOLUTIONS)
@on_gpu_too
def test_causal_conv(shape, dtype, seed):
    channels, width, activation, has_bias = CONVOLUTIONS[shape]
    spec = ConvSpec(channels, width, dtype, activation, has_bias, 4, CudaTarget())
    for num_tokens in (0, 1, 19):
        check_conv(spec, num_tokens, seed)


def test_gpus_have_the_kernels_that_cpus_have():
    of_gpu, of_cpu = (
        RecurrentSpec("kda", 2, 1, 8, 8, target=target) for target in (CudaTarget(), VectorTarget())
    )
    assert kernel_names(of_gpu) == kernel_names(of_cpu)
    of_gpu, of_cpu = (ConvSpec(8, 3, target=target) for target in (CudaTarget(), VectorTarget()))
    assert kernel_names(of_gpu) == kernel_names(of_cpu)


if __name__ == "__main__":
    tvm.testing.main()
