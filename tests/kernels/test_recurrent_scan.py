# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers against the recurrence in float64, and however tokens are cut."""

from __future__ import annotations

import dataclasses
import functools
import operator

import numpy as np
import pytest
import tvm
import tvm_ffi

from tir_kernels import build_kernel, kernel_names
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tir_kernels.script import read_by_tvm
from tvm_pagedkv.compiler.build import vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import tensor
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, parametrize_cpu, parametrize_seed
from ..support.cases.kernels.recurrent_cases import (
    SHAPES,
    Tokens,
    assert_outputs_close,
    assert_states_close,
    check_sequences,
    check_tree,
    states_of,
)
from ..support.harness.selections import latin_square


def make_spec(rule: str, shape: str, dtype: str = F32, cpu: str = "native", page: int = 4):
    return RecurrentSpec(rule, *SHAPES[shape], dtype, page, vector_target(cpu))


@parametrize_seed
@latin_square(4, "rule", "shape", "dtype")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_sequences_of_unequal_lengths(rule, shape, dtype, seed):
    """Decode, prefill and replay in one step; states begin as zeros or in a page."""
    check_sequences(make_spec(rule, shape, dtype), seed)


@parametrize_seed
@latin_square(6, "rule", "shape", "state_dtype")
@pytest.mark.parametrize("state_dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_states_are_rounded_after_each_token(rule, shape, state_dtype, seed):
    spec = make_spec(rule, shape, BF16)
    check_sequences(dataclasses.replace(spec, state_dtype=state_dtype), seed)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("state_dtype", [F32, BF16, F16])
def test_a_nan_stays_one(state_dtype, dtype):
    """Of any bits; to round them might give a number."""
    spec = make_spec("kda", "3-heads-24x8", dtype)
    spec = dataclasses.replace(spec, state_dtype=state_dtype)
    rng = np.random.default_rng(0)
    nan = np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001], np.uint32).view(F32)
    for name in ("k", "v", "log_decay", "beta"):
        for count in (3, 12):
            tokens, states = Tokens.random(spec, count, rng), tensor(states_of(spec, 1, rng))
            array = getattr(tokens, name)
            with np.errstate(invalid="ignore"):
                array.reshape(count, 3, -1)[1, :, 0] = nan.astype(array.dtype)
            tokens.run(states, [(count, 0, 0)], [1])
            found = np.isnan(states.numpy()[0].astype(F32))
            of_row = {"k": found[:, 0], "log_decay": found[:, 0], "v": found[..., 0], "beta": found}
            assert of_row[name].all()


@parametrize_seed
@latin_square(4, "rule", "state_dtype")
@pytest.mark.parametrize("state_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("rule", RULES)
def test_a_state_has_the_same_bits_however_its_tokens_came(rule, state_dtype, seed):
    """In one call, cut where states are kept, token by token, replayed, and beside others."""
    spec = make_spec(rule, "4-of-2-heads-128", BF16)
    spec = dataclasses.replace(spec, state_dtype=state_dtype)
    rng = np.random.default_rng(seed)
    tokens, pool = Tokens.random(spec, 40, rng), states_of(spec, 6, rng)
    whole, cut, replayed = (tensor(pool) for _ in range(3))
    o = tokens.run(whole, [(40, 0, 1)], [1], seed=seed)
    segments = [(7, 0, 2), (16, 2, 3), (16, 3, 4), (1, 4, 1)]
    of_cut = tokens.run(cut, segments, [4], seed=seed + 1)
    reference.assert_same_bits(of_cut, o)
    reference.assert_same_bits(cut.numpy()[1], whole.numpy()[1])
    _, expected = tokens.expected(pool[0])
    for page, position in ((2, 7), (3, 23), (4, 39)):
        assert_states_close(cut.numpy()[page], expected[position])
    # Few tokens update states where they lie, if there are heads for all threads.
    num_threads = int(tvm.get_global_func("runtime.NumThreads")())
    copies = range(-(-num_threads // spec.num_heads))
    for count in (1, 5):
        steps = tensor(np.repeat(pool[:1], len(copies), axis=0))
        for t in range(0, 40, count):
            some = functools.reduce(operator.add, [tokens[t : t + count]] * len(copies))
            segments_of_step = [(count, i, i) for i in copies]
            of_step = some.run(steps, segments_of_step, [1] * len(copies), seed=t)
            for i in copies:
                reference.assert_same_bits(of_step[i * count :][:count], o[t : t + count])
        for i in copies:
            reference.assert_same_bits(steps.numpy()[i], whole.numpy()[1])
    rows = [-1] * 39 + [0]
    of_last = tokens.run(replayed, segments, [4], rows=rows, seed=seed)
    reference.assert_same_bits(of_last[39:], o[39:])
    reference.assert_same_bits(replayed.numpy()[1:5], cut.numpy()[1:5])
    # With many sequences a task takes all columns of a head.
    num_others = 4 * num_threads
    pool, others = np.repeat(pool[:1], num_others + 2, axis=0), Tokens.random(spec, num_others, rng)
    beside = tensor(pool)
    segments = [(40, 0, 1), *((1, -1, 2 + i) for i in range(num_others))]
    of_first = (tokens + others).run(beside, segments, [1] * len(segments), seed=seed)[:40]
    reference.assert_same_bits(of_first, o)
    reference.assert_same_bits(beside.numpy()[1], whole.numpy()[1])


@parametrize_seed
def test_every_state_of_a_batch_is_updated(seed):
    """Tasks divide the heads of long, short and empty sequences by their tokens."""
    spec, rng = make_spec("gated_delta", "3-heads-24x8"), np.random.default_rng(seed)
    for num_sequences in (1, 2, 5, 40):
        counts = rng.choice([0, 1, 1, 2, 9, 10, 60], num_sequences)
        counts[rng.integers(num_sequences)] = 60
        tokens, pool = Tokens.random(spec, counts.sum(), rng), states_of(spec, num_sequences, rng)
        states, begin = tensor(pool), 0
        segments = [(n, i, i) for i, n in enumerate(counts)]
        actual = tokens.run(states, segments, [1] * num_sequences, seed=seed)
        for i, n in enumerate(counts):
            o, expected = tokens[begin : begin + n].expected(pool[i])
            assert_outputs_close(actual[begin : begin + n], o, F32)
            assert_states_close(states.numpy()[i], expected[-1] if n else pool[i])
            begin += n


@parametrize_seed
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_forest", [False, True])
def test_token_trees(is_forest, rule, seed):
    """A segment for each chain of a tree in breadth-first order, beside a sequence that decodes."""
    check_tree(make_spec(rule, "3-heads-24x8"), seed, is_forest)


def test_long_sequences_do_not_drift():
    """Ten thousand tokens whose decay is almost 1: an error of the decay would add up."""
    spec = RecurrentSpec("lightning", 1, 1, 4, 4, target=vector_target("native"))
    tokens = Tokens.random(spec, 10_000, np.random.default_rng(0))
    tokens.log_decay[:] = -1e-4
    tokens.k[:] = tokens.v[:] = 1
    states = tensor(np.zeros((1, 1, 4, 4), np.float32))
    tokens.run(states, [(10_000, -1, 0)], [1])
    _, expected = tokens.expected(np.zeros((1, 4, 4)))
    np.testing.assert_allclose(states.numpy()[0], expected[-1], rtol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_both_readers_of_tvmscript_agree(rule):
    spec = make_spec(rule, "3-heads-24x8")
    for name in kernel_names(spec):
        own = build_kernel(name, spec)
        with read_by_tvm():
            of_tvm = build_kernel(name, spec)
        assert tvm_ffi.structural_equal(own, of_tvm, map_free_vars=True), name


@parametrize_cpu("x86-64-v2", "haswell", "x86-64-v4")
@pytest.mark.parametrize("rule", ["gated_delta", "kda"])
def test_other_cpus(rule, cpu):
    spec, rng = make_spec(rule, "2-heads-64x256", F32, cpu), np.random.default_rng(1)
    tokens, pool = Tokens.random(spec, 12, rng), states_of(spec, 2, rng)
    states = tensor(pool)
    rows = [-1, -1, *range(10)]
    actual = tokens.run(states, [(12, 0, 1)], [1], rows=rows, cpu=cpu)
    o, expected = tokens.expected(pool[0])
    assert_outputs_close(actual[2:], o[2:], F32)
    assert_states_close(states.numpy()[1], expected[-1])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rule": "rwkv"}, "no rule 'rwkv'"),
        ({"num_heads": 3}, "multiple of num_key_heads, got 3 and 2"),
        ({"key_dim": 0}, "key_dim must be positive, got 0"),
        ({"page_size": -1}, "page_size must be positive, got -1"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"state_dtype": "int8"}, "state_dtype must be one of"),
    ],
)
def test_specs_are_checked(fields, message):
    values = {"rule": "kda", "num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 8}
    with pytest.raises(ValueError, match=message):
        RecurrentSpec(**(values | fields))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
