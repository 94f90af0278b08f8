# SPDX-License-Identifier: Apache-2.0
"""The kernel `attend_blocks` against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from ..support.cases.kernels import mla_cases
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, SPECS, make_spec, parametrize_seed
from ..support.cases.kernels.listed_cases import (
    BlockLatentBatch,
    BlockPagedBatch,
    ListedLatentBatch,
    ListedPagedBatch,
)
from ..support.harness.selections import few_of, latin_square

# (rows of the step, positions of K and V), blocks of a list, and pages of a block.
BATCHES = {
    "decode": ([(1, 5), (1, 300), (1, 64), (1, 2000)], 6, 2),
    "split": ([(1, 6000)], 40, 8),
    "mixed": ([(0, 0), (1, 1), (3, 70), (0, 33), (2, 2), (40, 60), (0, 0)], 3, 1),
    "a page": ([(7, 200)], 1, 1),
    "one block": ([(9, 60)], 2, 64),
}
# The lists of a row, then a spec: groups of all kinds, splits of heads among tasks.
CASES = {
    "32:8x128-bf16": (8, SPECS["32:8x128-bf16-p16"]),
    "6:2x64-f32-p8": (1, make_spec((6, 2), 64, (F32, F32), 8)),
    "8:4x32-int8": (2, make_spec((8, 4), 32, (F32, "int8"))),
    "4:2x128-int4": (2, make_spec((4, 2), 128, (BF16, "int4"), 4)),
    "6:3x96-fp8": (3, make_spec((6, 3), 96, (F16, "float8_e4m3fn"), 64)),
    "4:1x64-int5": (1, make_spec((4, 1), 64, (BF16, "int5"), 1)),
    "4:2x128-int8,int4": (2, make_spec((4, 2), 128, (BF16, "int8,int4"))),
    "8:8x512-f32": (4, make_spec((8, 8), 512)),
    "6:6x512-sinks": (6, make_spec((6, 6), 512, sink_logits=True)),
    "8:2x64-softcap-sinks": (2, make_spec((8, 2), 64, sink_logits=True, logit_softcap=30.0)),
}
MLA_SPECS = {
    "16x512+64-bf16": mla_cases.make_spec(16, (512, 64), (BF16, BF16)),
    "3x24+8-f32-p1": mla_cases.make_spec(3, (24, 8), page=1),
    "8x128+64-int8": mla_cases.make_spec(8, (128, 64), (F32, "int8"), 4),
    "8x128+64-int4": mla_cases.make_spec(8, (128, 64), (BF16, "int4"), 16),
}
parametrize_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


@parametrize_batch
@parametrize_seed
@latin_square(2, "batch", "name")
@pytest.mark.parametrize("name", few_of(CASES, 4))
def test_blocks(name, batch, seed):
    num_lists, spec = CASES[name]
    lengths, width, pages = batch
    case = BlockPagedBatch(spec, lengths, seed, width, pages * spec.page_size, num_lists)
    case.run()
    case.verify()


@parametrize_batch
@parametrize_seed
@pytest.mark.parametrize("name", few_of(MLA_SPECS, 1))
def test_latent_rows(name, batch, seed):
    lengths, width, pages = batch
    spec = MLA_SPECS[name]
    case = BlockLatentBatch(spec, lengths, seed, width, pages * spec.page_size)
    case.run()
    case.verify()


@pytest.mark.parametrize(
    ("by_blocks", "by_positions", "spec"),
    [
        (BlockPagedBatch, ListedPagedBatch, make_spec((6, 2), 64, (F32, F32), 8)),
        (BlockLatentBatch, ListedLatentBatch, MLA_SPECS["3x24+8-f32-p1"]),
    ],
    ids=["K and V", "latent rows"],
)
def test_blocks_are_their_positions(by_blocks, by_positions, spec):
    """Both kernels give the same, up to the order of sums."""
    blocks = by_blocks(spec, [(3, 90), (1, 300)], 3, 5, 2 * spec.page_size)
    blocks.run()
    listed = by_positions(spec, [(3, 90), (1, 300)], 3, 1)
    listed.listed = blocks.positions[:, 0].astype(np.int32)
    listed.q, listed.pages, listed.page_ids = blocks.q, blocks.pages, blocks.page_ids
    listed.run()
    for one, other in zip(blocks.state(), listed.state(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
