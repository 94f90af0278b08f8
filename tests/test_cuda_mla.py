# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention on GPUs, emulated, against the reference."""

from __future__ import annotations

import pytest

from tir_kernels.spec import RopeSpec

from .cuda_cases import BF16, F16, F32, make_spec, parametrize_seed
from .mla_cases import LatentBatch
from .test_cuda_trees import paged_trees
from .tree_cases import LatentTrees

NONE = RopeSpec(rotary_dim=0)
SPECS = {
    "16x512+64-bf16-p16": make_spec((16, 1), (576, 512), (BF16, BF16), kind="mla", rope=NONE),
    "5x64+16-f16-p4": make_spec((5, 1), (80, 64), (F16, F16), 4, kind="mla", rope=NONE),
    "3x40+24-f32-p1": make_spec((3, 1), (64, 40), (F32, F32), 1, kind="mla", rope=NONE),
}
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@parametrize_specs
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@parametrize_seed
def test_mla_prefill(spec, causal, seed):
    case = LatentBatch(spec, [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (20, 41), (1, 99)], seed)
    case.run(causal)
    case.verify(causal)


@parametrize_specs
@parametrize_seed
def test_mla_tree(spec, seed):
    case = LatentTrees(spec, paged_trees(seed), seed)
    case.run()
    case.verify()
