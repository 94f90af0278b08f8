# SPDX-License-Identifier: Apache-2.0
"""Random operations on two caches against the reference, with failures in between.

Everything meets everything: chains, forks, pops, windows, MLA, token trees and their commits,
shared prefixes, shared K and V, sinks, ALiBi, imports under way,
transfers, kernels that throw.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ...support.harness.selections import with_slow
from ...support.worlds.random_checkpoints import BeginImport, Export, FinishImport, ImportPages
from ...support.worlds.random_operations import (
    Add,
    Clear,
    EnableWindow,
    Fork,
    Mistake,
    Overwrite,
    Pop,
    Remove,
)
from ...support.worlds.random_run import run, run_until_all_happened
from ...support.worlds.random_shapes import MLA
from ...support.worlds.random_steps import Commit, Step, TreeStep
from ...support.worlds.random_transfers import ReleaseBlock, Transfer, connect
from ...support.worlds.random_world import World

NUM_STEPS = {0: 150, 1: 450, 2: 450}  # of each seed
NUM_MORE_STEPS = 9000
# Seed 0 goes on until everything has happened in this world only, the other seeds in all worlds.
GO_ON = ("sequence_windows",)
PAGE_SIZES = 1, 4, 16
SLOPES = 0.5, -0.1
# Layers without a window, with windows of two sizes, and MLA layers with both; rotation;
# whether sequences have windows of their own; soft-cap, and ALiBi by slopes that heads have; codec.
WORLDS = {
    "plain": {"layers": (0, 0)},
    "rotated": {"layers": (0, 0), "mode": "normal", "softcap": 2.0},
    "windows": {"layers": (0, 5, 0, 9, 5), "mode": ("inline", "none", "normal", "inline", "none")},
    "sliding": {"layers": (6, 6), "mode": "normal", "slopes": SLOPES},
    "chunks": {"layers": (-6, 0, -20, 5), "mode": ("normal", "none", "inline", "none")},
    "mla": {"layers": (MLA, f"{MLA}7")},
    "all": {
        "layers": (0, MLA, 5, f"{MLA}6", 0, 9),
        "mode": "inline",
        "softcap": 2.0,
        "slopes": SLOPES,
    },
    "sequence_windows": {
        "layers": (0, 0),
        "mode": ("inline", "none"),
        "has_windows": True,
        "softcap": 2.0,
    },
    "text_windows": {"layers": (0, 0), "mode": ("none", "normal"), "has_windows": True},
    "both_windows": {"layers": (0, 6, 0, 15), "has_windows": True, "slopes": SLOPES},
    "int8": {"layers": (0, MLA, 5, f"{MLA}6", 0, 9), "mode": "inline", "codec": "int8"},
    "float8": {"layers": (0, 6), "mode": "normal", "has_windows": True, "codec": "float8_e4m3fn"},
    "int4": {"layers": (0, MLA, 5), "mode": "normal", "codec": "int4"},
    "int5": {"layers": (0, MLA, 5), "mode": "normal", "codec": "int5"},
    "pair": {"layers": (0, 9), "has_windows": True, "codec": "int8,int4"},
    "int5_pair": {"layers": (0, 9), "has_windows": True, "codec": "int5,int4"},
    "int4_windows": {"layers": (0, 9), "has_windows": True, "codec": "int4"},
}
PARTS_OF_OTHERS = (
    *("plain", "sliding", "mla", "sequence_windows", "both_windows"),
    *("int4", "int5", "int5_pair", "int4_windows"),
)
OPERATIONS = [
    Step(), TreeStep(), Commit(), Add(), Remove(), Clear(), Fork(), Pop(), Overwrite(), Mistake(),
    EnableWindow(), Export(), BeginImport(), ImportPages(), FinishImport(),
    Transfer(), ReleaseBlock(),
]  # fmt: skip


def make_pair(rng: np.random.Generator, page_size: int, **fields) -> list[World]:
    """A cache with room and one that is often full, whose checkpoints go from one to the other."""
    pair = [
        World(rng, page_size=page_size, aux_manager="merged", num_pages=40, **fields),
        World(rng, page_size=page_size, aux_manager="plain", num_pages=13, **fields),
    ]
    pair[1].shelf = pair[0].shelf
    connect(pair)
    return pair


@pytest.mark.parametrize("name", with_slow(WORLDS, *PARTS_OF_OTHERS))
@pytest.mark.parametrize("seed", with_slow(NUM_STEPS, 1, 2), ids="seed{}".format)
def test_random_operations(record_property, seed, name):
    pairs = []
    for page_size in PAGE_SIZES:
        print("page size", page_size)
        rng = np.random.default_rng([seed, page_size])
        pairs.append(make_pair(rng, page_size, **WORLDS[name]))
        run(pairs[-1], OPERATIONS, NUM_STEPS[seed])
    worlds = [world for pair in pairs for world in pair]
    if seed != 0 or name in GO_ON:
        run_until_all_happened(pairs, OPERATIONS, max_steps=NUM_MORE_STEPS)
    counts = sum((world.counts for world in worlds), Counter())
    assert sum(counts.values()) >= len(PAGE_SIZES) * NUM_STEPS[seed]
    record_property("random_steps", dict(counts))
    print(dict(counts), dict(sum((world.failures for world in worlds), Counter())))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
