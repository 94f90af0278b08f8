# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention on GPUs, emulated, against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec

from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.tree_cases import LatentTrees
from ..support.emulators.cuda_emulator import launches, multiprocessors
from ..support.harness.selections import with_slow
from .test_cuda_trees import paged_trees

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
@on_gpu_too
def test_mla_prefill(spec, causal, seed):
    case = LatentBatch(spec, [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (20, 41), (1, 99)], seed)
    with multiprocessors(2):
        case.run(causal)
    case.verify(causal)


@pytest.mark.parametrize(
    "name, first, last", [("5x64+16-f16-p4", 60, 132), ("16x512+64-bf16-p16", 14, 35)]
)
@on_gpu_too
def test_bounds_beside_those_of_tiles(name, first, last):
    """The columns that all rows see end at every place of a tile."""
    case = LatentBatch(SPECS[name], [(2, n) for n in range(first, last)], 0)
    with multiprocessors(4):
        case.run()
    case.verify()


@pytest.mark.parametrize("name", ["5x64+16-f16-p4", "16x512+64-bf16-p16"])
@on_gpu_too
def test_scores_that_grow(name):
    """The sums are rescaled when later scores exceed the first ones."""
    case = LatentBatch(SPECS[name], [(4, 150)], 0)
    spec, slots = case.spec, case.slots(0)
    growth = np.linspace(0.1, 14, len(slots))[:, None]
    pages, offsets = np.divmod(slots, spec.page_size)
    rotated = case.pages[pages, offsets, spec.v_head_dim :]  # which are no part of V
    case.pages[pages, offsets, spec.v_head_dim :] = rotated.astype(np.float32) * growth
    with multiprocessors(1):
        case.run()
    case.verify()


@pytest.mark.parametrize("count", [1, 4, 30])
def test_a_few_sequences_take_all_blocks(count):
    """The positions of a long sequence are shared out, and merged again."""
    case = LatentBatch(SPECS["5x64+16-f16-p4"], [(1, 900), (1, 3), (2, 260)], 0)
    with multiprocessors(count), launches() as made:
        case.run(True)
    case.verify(True)
    attend, merge = made
    assert attend.grid[0] == merge.grid[0] == 2 * count


@parametrize_specs
@parametrize_seed
@on_gpu_too
def test_mla_tree(spec, seed):
    case = LatentTrees(spec, paged_trees(seed), seed)
    case.run()
    case.verify()


WIDE = "16x512+64-bf16-p16"  # which takes the emulator as long as all others
SLIDING_SPECS = {name: dataclasses.replace(s, kind="mla_sliding") for name, s in SPECS.items()}
parametrize_sliding = pytest.mark.parametrize(
    "spec", with_slow(SLIDING_SPECS.values(), SLIDING_SPECS[WIDE]), ids=SLIDING_SPECS
)


@parametrize_sliding
@pytest.mark.parametrize("window", [1, 37])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "past"])
@parametrize_seed
@on_gpu_too
def test_windows(spec, causal, window, seed):
    lengths = [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (20, 41), (1, 300), (9, 170)]
    case = LatentBatch(spec, lengths, seed)
    with multiprocessors(2):
        case.run(causal, window=window)
    case.verify(causal, window=window)


@parametrize_sliding
@parametrize_seed
@on_gpu_too
def test_trees_with_a_window(spec, seed):
    case = LatentTrees(spec, paged_trees(seed), seed)
    case.run(window=7)
    case.verify(window=7)


@on_gpu_too
def test_a_rotation_in_the_spec_does_not_matter():
    """Latent rows come rotated, and the kernels have no argument that asks for it."""
    spec = make_spec((3, 1), (136, 128), kind="mla", rope=RopeSpec())
    for case in (
        LatentBatch(spec, [(2, 20), (1, 9)], 0),
        LatentTrees(spec, [(1, 9, [-1]), (3, 5, [-1, 0, 0])], 0),
    ):
        case.run()
        case.verify()
    SharedBatch(spec, [(2, 3)], 0).check()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
