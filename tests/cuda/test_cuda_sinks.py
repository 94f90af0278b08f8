# SPDX-License-Identifier: Apache-2.0
"""Learned sinks in the kernels of attention for GPUs, emulated, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec

from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch, compiled, sink_logits
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.tree_cases import PagedTrees
from ..support.emulators.cuda_emulator import multiprocessors

SPEC = make_spec((10, 2), 32, (F16, F16), 4, sink_logits=True)
SLIDING = make_spec((6, 2), 24, (F32, F32), 8, kind="mha_sliding", sink_logits=True)
LATENT = make_spec(
    (5, 1), (80, 64), (BF16, BF16), 4, kind="mla", rope=RopeSpec(rotary_dim=0), sink_logits=True
)


@parametrize_seed
@on_gpu_too
def test_decode(seed):
    """Sequences that one block has, those that several share, and an empty one."""
    case = PagedBatch(SPEC, [(1, n) for n in (1, 700, 0, 9, 260)], seed)
    with multiprocessors(2):
        case.decode()
    case.verify()


@parametrize_seed
@on_gpu_too
def test_prefill(seed):
    """With few tiles their columns are split as well."""
    for lengths in ([(3, 600)], [(3, 70), (1, 5), (40, 40)]):
        case = PagedBatch(SPEC, lengths, seed)
        with multiprocessors(4):
            case.prefill()
        case.verify()


@parametrize_seed
@on_gpu_too
def test_windows_and_rows_of_the_step(seed):
    case = PagedBatch(SLIDING, [(1, 70), (1, 9)], seed)
    with multiprocessors(2):
        case.decode(window=30)
    case.verify(window=30)
    case = RaggedBatch(SLIDING, [(40, 40), (3, 0)], seed)
    with multiprocessors(2):
        case.prefill(window=30)
    case.verify(window=30)
    sinks = sink_logits(6) * np.float32(np.log2(np.e))
    nothing = case.lse.numpy()[-3:]  # rows that see only their sink
    np.testing.assert_allclose(nothing, np.broadcast_to(sinks, nothing.shape), rtol=1e-6)


@parametrize_seed
@on_gpu_too
def test_trees(seed):
    case = PagedTrees(SPEC, [(4, 40, [-1, 0, 0, 2])], seed)
    with multiprocessors(2):
        case.run()
    case.verify()


@parametrize_seed
@on_gpu_too
def test_latent_rows(seed):
    case = LatentBatch(LATENT, [(1, 1), (3, 170), (0, 33), (2, 0), (1, 99)], seed)
    with multiprocessors(2):
        case.run()
    case.verify()


@pytest.mark.parametrize("sink", [np.nan, np.inf], ids=["nan", "inf"])
def test_sinks_that_are_no_numbers(sink):
    """Every row of a head sees its sink, also where a merge lets it in."""
    case = PagedBatch(SPEC, [(1, n) for n in (1, 700, 0)], 0)
    sinks = np.zeros(10, np.float32)
    sinks[2] = sink
    arguments = [case.tensor(case.q), case.tensor(case.pages), *case._table()]
    scalars = case.scalars(causal=None, inline=False)
    with multiprocessors(2):
        compiled("decode", SPEC)(*arguments, case.o, case.lse, *scalars, case.tensor(sinks))
    o, lse = case.state()
    assert np.isnan(o[:, 2]).all() and np.isnan(lse[:, 2]).all()
    assert np.isfinite(np.delete(o, 2, axis=1)).all() and np.isfinite(np.delete(lse, 2, 1)).all()
