# SPDX-License-Identifier: Apache-2.0
"""Random operations on two caches against the reference, with failures in between.

Everything meets everything: chains, forks, pops, windows, MLA, token trees and their commits,
shared prefixes, shared K and V, sinks, imports under way, kernels that throw.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from .random_checkpoints import BeginImport, Export, FinishImport, ImportPages
from .random_operations import Add, Clear, EnableWindow, Fork, Mistake, Overwrite, Pop, Remove
from .random_run import run, run_until_all_happened
from .random_steps import Commit, Step, TreeStep
from .random_world import MLA, World

NUM_STEPS = 450
SEEDS, PAGE_SIZES = range(2), (1, 4, 16)
# Layers without a window, with windows of two sizes, and MLA layers, alone and mixed; rotation;
# whether sequences have windows of their own.
LAYERS = {
    "plain": ((0, 0), "none", False),
    "rotated": ((0, 0), "normal", False),
    "windows": ((0, 5, 0, 9, 5), "inline", False),
    "sliding": ((6, 6), "normal", False),
    "mla": ((MLA, MLA), "none", False),
    "all": ((0, MLA, 5, MLA, 0, 9), "inline", False),
    "sequence_windows": ((0, 0), "inline", True),
    "both_windows": ((0, 6, 0, 15), "none", True),
}
OPERATIONS = [
    Step(), TreeStep(), Commit(), Add(), Remove(), Clear(), Fork(), Pop(), Overwrite(), Mistake(),
    EnableWindow(), Export(), BeginImport(), ImportPages(), FinishImport(),
]  # fmt: skip


def make_pair(rng: np.random.Generator, layers: tuple, page_size: int) -> list[World]:
    """A cache with room and one that is often full, whose checkpoints go from one to the other."""
    kinds, mode, has_windows = layers
    pair = [
        World(rng, kinds, page_size, mode, "merged", 40, has_windows),
        World(rng, kinds, page_size, mode, "plain", 13, has_windows),
    ]
    pair[1].shelf = pair[0].shelf
    return pair


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", SEEDS, ids="seed{}".format)
def test_random_operations(record_property, seed, layers):
    pairs = []
    for page_size in PAGE_SIZES:
        print("page size", page_size)
        pairs.append(make_pair(np.random.default_rng([seed, page_size]), LAYERS[layers], page_size))
        run(pairs[-1], OPERATIONS, NUM_STEPS)
    worlds = [world for pair in pairs for world in pair]
    run_until_all_happened(pairs, OPERATIONS, most_steps=20 * NUM_STEPS)
    counts = sum((world.counts for world in worlds), Counter())
    record_property("random_steps", dict(counts))
    print(dict(counts), dict(sum((world.failures for world in worlds), Counter())))


def test_number_of_steps():
    assert len(SEEDS) * len(LAYERS) * len(PAGE_SIZES) * NUM_STEPS >= 20_000
