# SPDX-License-Identifier: Apache-2.0
"""Random operations on caches of an emulated device, whose kernels run as late as they may."""

from __future__ import annotations

import numpy as np
import pytest

from ..cache.random.test_cache_random import OPERATIONS, WORLDS, make_pair
from ..support.harness.selections import with_slow
from ..support.worlds.random_run import run

NUM_STEPS, PAGE_SIZE = 250, 4
REPEATED = (
    "plain", "sliding", "chunks", "mla", "text_windows", "both_windows", "int8", "int5_pair",
    "int4_windows",
)  # fmt: skip


@pytest.mark.parametrize("name", with_slow(WORLDS, *REPEATED))
@pytest.mark.parametrize("seed", [0], ids="seed{}".format)
def test_random_operations(device, seed, name):
    rng = np.random.default_rng([seed, PAGE_SIZE])
    pair = make_pair(rng, PAGE_SIZE, device=device, **WORLDS[name])
    run(pair, OPERATIONS, NUM_STEPS)
    for world in pair:
        world.compare_all()
    done = sum(world.counts["Step: done"] for world in pair)
    assert done > NUM_STEPS / 10


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
