# SPDX-License-Identifier: Apache-2.0
"""Kernels for AMX against the reference, on a model of the tile registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec

from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch
from ..support.cases.kernels.kernel_specs import BATCHES, BF16, make_spec, parametrize_seed
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.tree_cases import LatentTrees, PagedTrees, chain, random_parents
from ..support.emulators import tile_model
from ..support.emulators.tile_model import AMX
from ..support.harness.selections import few_of, latin_square
from .test_append_prefill import check as check_append_prefill
from .test_shared_prefix_kernel import SEGMENTS, SharedBatch

pytestmark = pytest.mark.skipif(not tile_model.runs_here(), reason="no AVX-512 with bfloat16")
BF16_PAGES = (BF16, BF16)


def amx_spec(heads, dim, dtypes=BF16_PAGES, page=16, **fields):
    return make_spec(heads, dim, dtypes, page, target=AMX, **fields)


@pytest.fixture(autouse=True)
def amx():
    """Execute tile instructions on the model."""
    with tile_model.tile_model():
        yield
        assert tile_model.counts().dots


# Whole steps of the sums, and depths and widths that end within a tile.
SPECS = {
    "32:8x128": amx_spec((32, 8), 128),
    "3:1x72-p4": amx_spec((3, 1), 72, page=4),
    "2:1x256": amx_spec((2, 1), 256, page=8),
    "4:2x8": amx_spec((4, 2), 8, page=32),
    "8:2x80-int8": amx_spec((8, 2), 80, (BF16, "int8"), 4),
}


@latin_square(2, "causal", "batch")
@pytest.mark.parametrize("spec", few_of(SPECS.values(), 3), ids=SPECS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("batch", BATCHES)
@parametrize_seed
def test_prefill(spec, causal, batch, seed):
    case = PagedBatch(spec, BATCHES[batch], seed)
    case.prefill(causal)
    case.verify(causal)


@pytest.mark.parametrize(
    "spec",
    [
        amx_spec((8, 2), (192, 128)),
        amx_spec((6, 2), (24, 104)),
        amx_spec((5, 1), (576, 512), logit_softcap=30.0),
        amx_spec((22, 2), 64, alibi_slopes=tuple(np.geomspace(1e-3, 1, 22))),
    ],
    ids=["192/128", "24/104", "576/512-cap", "64-alibi"],
)
@parametrize_seed
def test_prefill_ragged(spec, seed):
    case = RaggedBatch(spec, BATCHES["tiles"], seed)
    case.prefill()
    case.verify()


@parametrize_seed
def test_rows_that_see_nothing(seed):
    case = RaggedBatch(amx_spec((8, 2), 64), [(100, 40), (150, 10), (40, 0)], seed)
    case.prefill()
    case.verify()


@parametrize_seed
def test_append_prefill(seed):
    check_append_prefill(amx_spec((8, 2), 64), BATCHES["tiles"], seed, apply_rope=True)


@parametrize_seed
def test_windows_and_rotation(seed):
    spec = amx_spec((4, 2), 96, kind="mha_sliding", rope=RopeSpec(1e4, 1.0, 96))
    case = PagedBatch(spec, [(3, 70), (2, 2), (130, 290)], seed)
    case.prefill(inline=True, window=40)
    case.verify(inline=True, window=40)


@parametrize_seed
def test_trees(seed):
    rng = np.random.default_rng(seed)
    trees = [(70, 90, random_parents(rng, 70)), (0, 20, []), (3, 5, chain(3))]
    case = PagedTrees(amx_spec((4, 2), 64), trees, seed)
    case.run(inline=True)
    case.verify(inline=True)
    case = LatentTrees(amx_mla_spec(5, (40, 24)), trees, seed)
    case.run()
    case.verify()


@parametrize_seed
def test_hidden_positions_that_are_not_finite(seed):
    """A weight of 0 would make NaN of them: rows with infinity after what they see stay finite."""
    case = RaggedBatch(amx_spec((2, 2), 40), [(70, 70)], seed)
    case.v[50:60:3] = np.inf
    case.v[41] = np.nan
    case.prefill()
    o = case.o.numpy()
    assert np.isfinite(o[:41].astype(np.float32)).all()
    assert not np.isfinite(o[60:].astype(np.float32)).any()
    finite = RaggedBatch(amx_spec((2, 2), 40), [(70, 70)], seed)
    expected = finite.expected()
    case_rows, reference_rows = (x[:41] for x in (o, expected[0]))
    np.testing.assert_allclose(
        case_rows.astype(np.float32), np.asarray(reference_rows, np.float32), atol=0.05
    )


@parametrize_seed
def test_every_thread_has_tiles_of_its_own(seed):
    case = PagedBatch(amx_spec((8, 8), 64), [(200, 900), (130, 700), (90, 90)], seed)
    case.prefill()
    case.verify()
    done = tile_model.counts()
    assert done.begins == done.ends == 2
    assert done.threads == 2


def amx_mla_spec(num_heads, dims, dtypes=BF16_PAGES, page=16):
    return replace(make_mla_spec(num_heads, dims, dtypes, page), target=AMX)


@pytest.mark.parametrize(
    "spec",
    [
        amx_mla_spec(16, (512, 64)),
        amx_mla_spec(5, (40, 24), page=4),
        amx_mla_spec(40, (64, 8), (BF16, "int8"), 32),
    ],
    ids=["16x576/512", "5x64/40-p4", "40x72/64-int8-p32"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@parametrize_seed
def test_latent_rows(spec, causal, seed):
    lengths = [(0, 0), (1, 1), (9, 70), (2, 0), (1, 500), (4, 6)]
    case = LatentBatch(spec, lengths, seed)
    case.run(causal)
    case.verify(causal)


@pytest.mark.parametrize("kv_len", [37, 64, 96])
@parametrize_seed
def test_latent_rows_that_are_not_finite(kv_len, seed):
    """The last position is NaN, and only the last row sees it."""
    spec = amx_mla_spec(16, (64, 16))
    case = LatentBatch(spec, [(2, kv_len)], seed)
    expected = case.expected()[0][0].astype(np.float32)
    slot = case.slots(0)[-1]
    case.pages[slot // spec.page_size, slot % spec.page_size] = np.nan
    case.run()
    o = case.o.numpy().astype(np.float32)
    np.testing.assert_allclose(o[0], expected, atol=0.02)
    assert np.isnan(o[1]).all()


@pytest.mark.parametrize(
    "spec, segments",
    [
        (amx_spec((32, 8), 128), "many"),
        (amx_spec((3, 1), 24, page=128), "wide"),
        (amx_spec((5, 1), 80, (BF16, "int8"), 4), "long"),
        (amx_spec((16, 1), (40, 24), page=4, kind="mla"), "many"),
    ],
    ids=["32:8x128", "3:1x24-p128", "5:1x80-int8-p4", "16x40/24-p4"],
)
@parametrize_seed
def test_shared_pages(spec, segments, seed):
    SharedBatch(spec, SEGMENTS[segments], seed).check()
