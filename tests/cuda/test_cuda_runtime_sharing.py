# SPDX-License-Identifier: Apache-2.0
"""Forks of forks on a CUDA device that is emulated: the pages that they share are read once."""

from __future__ import annotations

import pytest

from ..support.emulators.python_kernels import share_every_prefix
from ..support.worlds.permissive_steps import permissive_step
from .test_cuda_runtime import DevicePair, make_cache

PAGE = 4
# How many rows of each sequence, or the parents of nodes; forks of either half come in between.
PROMPT, BRANCHES = {0: 16}, {0: 8, 1: 8}
STEPS = (
    {0: 1, 1: 1, 2: 1, 3: 1},
    {3: 1, 0: 3, 2: 2, 1: 1},
    {2: 1, 0: 1},
    {0: [-1, 0, 0, 1], 2: [-1, 0], 1: [-1]},
    {3: [-1], 0: [1], 1: [0]},
)


def grow(pair: DevicePair) -> list:
    """Four sequences with 16 positions in common, pairs of them with 8 more; the steps to come."""
    share_every_prefix(pair.cache)
    first, second, *steps = pair.prepare((PROMPT, BRANCHES, *STEPS))
    pair.add(0)
    pair.step(first)
    pair.fork(0, 1)
    pair.step(second)
    pair.fork(0, 2)
    pair.fork(1, 3)
    return steps


@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_forks_of_forks(device, seed):
    pair = DevicePair(device, seed=seed)
    rest = grow(pair)
    saved = []
    for step in rest:
        pair.step(step)
        stats = pair.cache.stats()
        apart, read = (stats[f"step_pages_read{x}"] for x in ("_without_sharing", ""))
        saved.append(apart - read)
    # The prompt three times; or that of each branch once, or all of one branch.
    of_prompt, of_branch = 16 // PAGE, 8 // PAGE
    assert saved[0] == saved[1] == 3 * of_prompt + 2 * of_branch
    assert saved[2] == of_prompt + of_branch
    stats = pair.cache.stats()
    assert stats["pages_read"] < stats["pages_read_without_sharing"]
    pair.check()


def _step_without(device, event: int) -> int:
    """How many events the first step after the forks has, and one of them has no effect."""
    pair = DevicePair(device)
    rest = grow(pair)
    begin = device.num_events()
    with device.without_event(event):
        pair.step(rest[0])
    return device.num_events() - begin


def test_the_arrays_of_segments_are_waited_for(device):
    """They are copied with the step's own arrays: its last event covers both."""
    last = _step_without(device, -1) - 1
    with pytest.raises(RuntimeError, match="without an event between"):
        _step_without(device, last)


def test_little_is_read_again(device):
    """Launches take as long as reading more than what is worth a call on a CPU."""
    cache = make_cache(device)
    cache.add_sequence(0)
    for _ in range(6):
        with permissive_step(cache, [0], [32]):
            pass
    for child in (1, 2, 3):
        cache.fork_sequence(0, child)
    with permissive_step(cache, [0, 1, 2, 3], [1, 1, 1, 1]):
        pass
    stats = cache.stats()
    assert stats["step_pages_read"] == stats["step_pages_read_without_sharing"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
