# SPDX-License-Identifier: Apache-2.0
"""The kernel `attend_listed` against the reference."""

from __future__ import annotations

import pytest

from ..support.cases.kernels import mla_cases
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, SPECS, make_spec, parametrize_seed
from ..support.cases.kernels.listed_cases import ListedLatentBatch, ListedPagedBatch
from ..support.harness.selections import few_of

# (rows of the step, positions of K and V) and the length of lists: single rows, which tasks split;
# prompts; sequences without rows.
BATCHES = {
    "decode": ([(1, 5), (1, 0), (1, 300), (1, 64)], 90),
    "split": ([(1, 3000)], 1700),
    "mixed": ([(0, 0), (1, 1), (3, 70), (0, 33), (2, 2), (40, 60), (0, 0)], 33),
    "one position": ([(7, 200)], 1),
}
OTHER_SPECS = [
    SPECS[name]
    for name in (
        "32:8x128-f32-p16",
        "5:1x80-f32-bf16-p4",
        "32:8x128-f16-p1",
        "71:1x64-f16-f32-p256",
        "2:2x8-f32-p8",
        "7:1x576-bf16-f32-p2",
        "3:1x24-bf16-p128",
    )
]
CODEC_SPECS = {
    "int8": make_spec((8, 2), 64, (F32, "int8")),
    "int4": make_spec((4, 2), 128, (BF16, "int4"), 4),
    "fp8": make_spec((6, 3), 96, (F16, "float8_e4m3fn"), 64),
    "int5": make_spec((4, 1), 64, (BF16, "int5"), 1),
    "int8,int4": make_spec((4, 2), 128, (BF16, "int8,int4"), 16),
}
MLA_SPECS = {
    "16x512+64-bf16": mla_cases.make_spec(16, (512, 64), (BF16, BF16)),
    "3x24+8-f32-p1": mla_cases.make_spec(3, (24, 8), page=1),
    "20x64+32-f16-p64": mla_cases.make_spec(20, (64, 32), (F16, F16), 64),
    "8x128+64-int8": mla_cases.make_spec(8, (128, 64), (F32, "int8"), 4),
    "8x128+64-int4": mla_cases.make_spec(8, (128, 64), (BF16, "int4"), 16),
}
parametrize_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


@parametrize_batch
@parametrize_seed
@pytest.mark.parametrize("spec", few_of([SPECS["32:8x128-bf16-p16"], *OTHER_SPECS], 2), ids=str)
def test_listed(spec, batch, seed):
    case = ListedPagedBatch(spec, batch[0], seed, batch[1])
    case.run()
    case.verify()


@parametrize_batch
@parametrize_seed
@pytest.mark.parametrize("name", few_of(CODEC_SPECS, 2))
def test_quantized(name, batch, seed):
    case = ListedPagedBatch(CODEC_SPECS[name], batch[0], seed, batch[1])
    case.run()
    case.verify()


@parametrize_batch
@parametrize_seed
@pytest.mark.parametrize("name", few_of(MLA_SPECS, 1))
def test_latent_rows(name, batch, seed):
    case = ListedLatentBatch(MLA_SPECS[name], batch[0], seed, batch[1])
    case.run()
    case.verify()
