# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers against the recurrence in float64, and however tokens are cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm_ffi
from tvm.target import Target

from tir_kernels.cpu.recurrent.scan import recurrent_scan
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tir_kernels.script import read_by_tvm
from tvm_pagedkv.compiler.build import load_kernels

from .. import reference
from ..reference.recurrent import recurrence
from ..support import fast_compilation
from ..support.attention_cases import indptr, normal, tensor
from ..support.kernel_specs import BF16, F16, F32, parametrize_cpu, parametrize_seed, target_of
from ..support.selections import latin_square
from ..support.tolerances import ARITHMETIC

SHAPES = {
    "4-of-2-heads-128": (4, 2, 128, 128),  # Qwen3-Next and Qwen3.5 have 32 of 16
    "3-heads-24x8": (3, 3, 24, 8),
    "6-of-1-head-7x20": (6, 1, 7, 20),
    "2-heads-64x256": (2, 2, 64, 256),
}
SCALE = 0.3


@functools.lru_cache(maxsize=64)
def compiled(spec: RecurrentSpec, cpu: str = "native"):
    target = Target(str(fast_compilation.resolve_target(cpu)))
    return load_kernels(
        {"recurrent_scan": functools.partial(recurrent_scan, spec)}, repr(spec), target
    )["recurrent_scan"]


@dataclass
class Tokens:
    """Rows of sequences, one after another."""

    spec: RecurrentSpec
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, spec: RecurrentSpec, count: int, rng) -> Tokens:
        """Keys of length 1, as models have them, and decays from 0.1 to almost 1."""
        k = normal(rng, (count, spec.num_key_heads, spec.key_dim), F32)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        gates = (spec.num_heads, spec.key_dim) if spec.decays_by_channel else (spec.num_heads,)
        return cls(
            spec,
            normal(rng, k.shape, spec.dtype),
            k.astype(spec.dtype),
            normal(rng, (count, spec.num_heads, spec.value_dim), spec.dtype),
            -(2.3 * rng.random((count, *gates), np.float32) ** 4),
            rng.random((count, spec.num_heads), np.float32),
        )

    def __getitem__(self, rows) -> Tokens:
        fields = (self.q, self.k, self.v, self.log_decay, self.beta)
        return Tokens(self.spec, *(x[rows] for x in fields))

    def expected(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and states of the reference."""
        beta = self.beta if self.spec.is_delta else None
        return recurrence(self.q, self.k, self.v, self.log_decay, beta, state, SCALE)

    def run(self, states, segments: list[tuple[int, int, int]], sequences: list[int], cpu="native"):
        """Run the kernel.

        Parameters
        ----------
        states : tvm tensor
            The pool, which is written.
        segments : list of (number of rows, read page, write page)
        sequences : list of int
            Segments of each sequence.

        Returns
        -------
        array ``[T, num_heads, value_dim]``
        """
        rows, read, write = (list(x) for x in zip(*segments, strict=True))
        o = tensor(np.full(self.v.shape, np.nan, self.spec.dtype))
        rules = [self.beta] if self.spec.is_delta else []
        arrays = [self.q, self.k, self.v, self.log_decay, *rules]
        tables = [indptr(sequences), indptr(rows), np.int32(read), np.int32(write)]
        compiled(self.spec, cpu)(*map(tensor, arrays), states, *map(tensor, tables), o, SCALE)
        return o.numpy()


def pool_of(spec: RecurrentSpec, num_pages: int, rng) -> np.ndarray:
    return normal(rng, (num_pages, spec.num_heads, spec.key_dim, spec.value_dim), F32)


def assert_states_close(actual, expected) -> None:
    """Compare rows of states, with errors relative to the largest row of a head."""
    size = np.sqrt((expected**2).mean(-1, keepdims=True).max(-2, keepdims=True))
    assert np.isfinite(actual).all()
    assert (np.abs(actual - expected) <= 1e-5 * size).all()


def assert_outputs_close(actual, expected, dtype: str) -> None:
    size = np.sqrt((expected**2).mean(-1, keepdims=True))
    errors = np.abs(np.asarray(actual, np.float64) - expected)
    assert (errors <= ARITHMETIC[dtype] * np.maximum(size, np.abs(expected))).all()


@parametrize_seed
@latin_square(4, "rule", "shape", "dtype")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_sequences_of_unequal_lengths(rule, shape, dtype, seed):
    """Decode and prefill in one step; states begin as zeros or in a page, and end there or not."""
    spec = RecurrentSpec(rule, *shape, dtype, target_of("native", dtype))
    rng = np.random.default_rng(seed)
    segments = [(1, 4, 4), (37, -1, 1), (1, 2, 0), (5, 3, 5), (2, -1, 6)]
    rows = [n for n, _, _ in segments]
    tokens, pool = Tokens.random(spec, sum(rows), rng), pool_of(spec, 8, rng)
    states = tensor(pool)
    actual = tokens.run(states, segments, [1] * len(segments))
    after, begin = states.numpy(), 0
    for count, read, write in segments:
        state = np.zeros(pool.shape[1:]) if read < 0 else pool[read]
        o, expected = tokens[begin : begin + count].expected(state)
        assert_outputs_close(actual[begin : begin + count], o, dtype)
        assert_states_close(after[write], expected[-1])
        begin += count
    np.testing.assert_array_equal(after[[2, 3, 7]], pool[[2, 3, 7]])


@parametrize_seed
@pytest.mark.parametrize("rule", RULES)
def test_a_state_has_the_same_bits_however_its_tokens_came(rule, seed):
    """In one call, cut into segments whose states are kept, and token by token."""
    spec = RecurrentSpec(rule, *SHAPES["4-of-2-heads-128"], BF16, target_of("native"))
    rng = np.random.default_rng(seed)
    tokens, pool = Tokens.random(spec, 40, rng), pool_of(spec, 6, rng)
    whole, cut, single = tensor(pool), tensor(pool), tensor(pool)
    o = tokens.run(whole, [(40, 0, 1)], [1])
    of_cut = tokens.run(cut, [(7, 0, 2), (16, 2, 3), (16, 3, 4), (1, 4, 1)], [4])
    reference.assert_same_bits(of_cut, o)
    reference.assert_same_bits(cut.numpy()[1], whole.numpy()[1])
    _, expected = tokens.expected(pool[0])
    for page, position in ((2, 7), (3, 23), (4, 39)):
        assert_states_close(cut.numpy()[page], expected[position])
    for t in range(40):
        of_token = tokens[t : t + 1].run(single, [(1, 0 if t == 0 else 5, 5)], [1])
        reference.assert_same_bits(of_token, o[t : t + 1])
    reference.assert_same_bits(single.numpy()[5], whole.numpy()[1])


def test_long_sequences_do_not_drift():
    """Ten thousand tokens whose decay is almost 1: an error of the decay would add up."""
    spec = RecurrentSpec("lightning", 1, 1, 4, 4, F32, target_of("native"))
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
    spec = RecurrentSpec(rule, *SHAPES["3-heads-24x8"])
    own = recurrent_scan(spec)
    with read_by_tvm():
        of_tvm = recurrent_scan(spec)
    assert tvm_ffi.structural_equal(own, of_tvm, map_free_vars=True)


@parametrize_cpu("x86-64-v2", "haswell", "x86-64-v4")
@pytest.mark.parametrize("rule", ["gated_delta", "kda"])
def test_other_cpus(rule, cpu):
    spec = RecurrentSpec(rule, *SHAPES["2-heads-64x256"], F32, target_of(cpu))
    rng = np.random.default_rng(1)
    tokens, pool = Tokens.random(spec, 12, rng), pool_of(spec, 2, rng)
    states = tensor(pool)
    actual = tokens.run(states, [(12, 0, 1)], [1], cpu)
    o, expected = tokens.expected(pool[0])
    assert_outputs_close(actual, o, F32)
    assert_states_close(states.numpy()[1], expected[-1])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rule": "rwkv"}, "no rule 'rwkv'"),
        ({"num_heads": 3}, "multiple of num_key_heads, got 3 and 2"),
        ({"key_dim": 0}, "key_dim must be positive, got 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_specs_are_checked(fields, message):
    values = {"rule": "kda", "num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 8}
    with pytest.raises(ValueError, match=message):
        RecurrentSpec(**(values | fields))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
