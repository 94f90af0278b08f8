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
from .random_run import run
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


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", SEEDS, ids="seed{}".format)
def test_random_operations(record_property, seed, layers):
    kinds, mode, has_windows = LAYERS[layers]
    worlds = []
    for page_size in PAGE_SIZES:
        rng = np.random.default_rng([seed, page_size])
        pair = [
            World(rng, kinds, page_size, mode, "merged", 40, has_windows),
            World(rng, kinds, page_size, mode, "plain", 18, has_windows),
        ]
        pair[1].shelf = pair[0].shelf
        print("page size", page_size)
        run(pair, OPERATIONS, NUM_STEPS)
        worlds += pair
    counts, failures = Counter(), Counter()
    for world in worlds:
        counts += world.counts
        failures += world.failures
    record_property("random_steps", dict(counts))
    print(dict(counts), dict(failures))
    assert sum(counts.values()) == len(PAGE_SIZES) * NUM_STEPS
    check_counts(counts, failures, has_windows)
    check_statistics([world.cache.stats() for world in worlds], layers)


def check_counts(counts: Counter, failures: Counter, has_windows: bool) -> None:
    """That everything has happened, and failed."""
    assert counts["Step"] > 200 and counts["TreeStep"] > 100 and counts["Fork"] > 30
    assert counts["Commit"] > 40 and counts["FinishImport"] > 2
    always_refused = {"Mistake"}
    never_refused = {"Clear", "Remove", "Overwrite", "Pop"}
    for name in (type(operation).__name__ for operation in OPERATIONS):
        is_possible = name not in always_refused and (has_windows or name != "EnableWindow")
        assert counts[name] > 0 or not is_possible, name
        assert counts[f"{name}: refused"] > 0 or name in never_refused, name
    for name in ("Step", "TreeStep"):
        assert counts[f"{name}: full"] > 0, name
    assert sum(counts[name] for name in counts if name.endswith(": a kernel fails")) > 2
    assert failures["kernels of layers"] > 20 and failures["mistakes in a step"] > 20


def check_statistics(stats: list[dict], layers: str) -> None:
    """That what should be rare has happened too."""

    def total(key: str) -> int:
        return sum(each[key] for each in stats)

    assert total("moved_tree_nodes") > 0 and total("cow_page_copies") > 0
    # Layers with a window share no prefixes.
    is_shared = total("pages_read_without_sharing") > total("pages_read")
    assert is_shared == (layers != "sliding")


def test_number_of_steps():
    assert len(SEEDS) * len(LAYERS) * len(PAGE_SIZES) * NUM_STEPS >= 20_000
