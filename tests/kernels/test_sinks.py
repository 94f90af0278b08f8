# SPDX-License-Identifier: Apache-2.0
"""Learned sinks in the kernels of attention, against attention and a sink after it."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels import kernel_names

from ..support.cases.kernels import mla_cases
from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch, compiled, sink_logits
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, make_spec, parametrize_seed
from ..support.cases.kernels.listed_cases import ListedLatentBatch, ListedPagedBatch
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.tree_cases import LatentTrees, PagedTrees, RaggedTrees
from ..support.harness.selections import with_slow
from .test_append_prefill import check as check_append_prefill

SPECS = {
    "64:8x64-bf16": make_spec((64, 8), 64, (BF16, BF16), sink_logits=True),
    "5:1x40-f32-int8-cap": make_spec(
        (5, 1), 40, (F32, "int8"), 4, logit_softcap=20.0, sink_logits=True
    ),
    "6:2x24-f16": make_spec((6, 2), 24, (F16, F16), 8, sink_logits=True),
}
SLIDING = make_spec((10, 2), 32, (F32, F32), 4, kind="mha_sliding", sink_logits=True)
specs = with_slow(SPECS.values(), SPECS["64:8x64-bf16"], SPECS["5:1x40-f32-int8-cap"])
parametrize_specs = pytest.mark.parametrize("spec", specs, ids=SPECS)
MIXED = [(3, 70), (1, 300), (65, 90), (1, 1), (9, 9)]
ONE_ROW = [(1, n) for n in (1, 70, 700, 3)]


def latent_spec(**fields):
    return mla_cases.make_spec(7, (64, 16), (BF16, BF16), original=(40, 32), **fields)


@parametrize_specs
@parametrize_seed
def test_decode_and_prefill(spec, seed):
    case = PagedBatch(spec, ONE_ROW, seed)
    case.decode()
    case.verify()
    case = PagedBatch(spec, MIXED, seed)
    case.prefill()
    case.verify()


@pytest.mark.slow
@parametrize_seed
def test_windows(seed):
    case = PagedBatch(SLIDING, ONE_ROW, seed)
    case.decode(window=30)
    case.verify(window=30)
    for kind in (PagedBatch, RaggedBatch):
        case = kind(SLIDING, MIXED, seed)
        case.prefill(window=30)
        case.verify(window=30)


@parametrize_seed
def test_rows_of_the_step(seed):
    case = RaggedBatch(SPECS["6:2x24-f16"], [(3, 3), (1, 1), (70, 70), (40, 0)], seed)
    case.prefill()
    case.verify()
    sinks = sink_logits(6) * np.float32(np.log2(np.e))
    nothing = case.lse.numpy()[-40:]  # rows that see only their sink
    np.testing.assert_allclose(nothing, np.broadcast_to(sinks, nothing.shape), rtol=1e-6)


@pytest.mark.slow
@parametrize_seed
def test_trees(seed):
    spec = SPECS["6:2x24-f16"]
    for kind, first in ((PagedTrees, 40), (RaggedTrees, 4)):
        case = kind(spec, [(4, first, [-1, 0, 0, 2])], seed)
        case.run()
        case.verify()


@pytest.mark.slow
@parametrize_seed
def test_append_and_prefill(seed):
    check_append_prefill(SPECS["64:8x64-bf16"], [(3, 70), (65, 90)], seed, apply_rope=True)


@pytest.mark.slow
@parametrize_seed
def test_latent_rows(seed):
    spec = latent_spec(sink_logits=True)
    for case in (
        LatentBatch(spec, [(1, 900), (1, 3), (4, 20)], seed),
        LatentTrees(spec, [(4, 40, [-1, 0, 0, 2])], seed),
    ):
        case.run()
        case.verify()


@pytest.mark.slow
@parametrize_seed
def test_lists(seed):
    specs = (
        make_spec((6, 2), 24, lists=True, sink_logits=True),
        latent_spec(lists=True, sink_logits=True),
    )
    for kind, spec in zip((ListedPagedBatch, ListedLatentBatch), specs, strict=True):
        case = kind(spec, [(3, 70), (1, 1)], seed, 12)
        case.run()
        case.verify()


@pytest.mark.parametrize("sink", [np.nan, np.inf], ids=["nan", "inf"])
def test_sinks_that_are_no_numbers(sink):
    """Every row of a head sees its sink."""
    case = PagedBatch(SPECS["6:2x24-f16"], [*ONE_ROW, (1, 0)], 0)
    kernel = compiled("decode", case.spec)
    sinks = np.zeros(6, np.float32)
    sinks[2] = sink
    arguments = [case.tensor(case.q), case.tensor(case.pages), *case._table()]
    scalars = case.scalars(causal=None, inline=False)
    kernel(*arguments, case.o, case.lse, *scalars, case.tensor(sinks))
    o, lse = case.state()
    assert np.isnan(o[:, 2]).all() and np.isnan(lse[:, 2]).all()
    assert np.isfinite(np.delete(o, 2, axis=1)).all() and np.isfinite(np.delete(lse, 2, 1)).all()


def test_layers_with_sinks_need_no_kernel_after_attention():
    assert "apply_sinks" not in kernel_names(SPECS["64:8x64-bf16"])
    assert "apply_sinks" in kernel_names(make_spec((64, 8), 64))
