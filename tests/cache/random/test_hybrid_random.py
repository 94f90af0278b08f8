# SPDX-License-Identifier: Apache-2.0
"""Hybrids under random operations with everything at once: lists, blocks, budgets, tiers, files."""

from __future__ import annotations

import pytest

import tvm_pagedkv as pkv

from ...support.emulators.dict_store import DictStore, FaultyStore
from ...support.harness.selections import few_of
from ...support.worlds.hybrid_world import HybridWorld

CASES = [  # type, type of states, history, bytes of host memory, store, policy
    ("float32", "bfloat16", 16, 1 << 18, FaultyStore, "through"),
    ("float32", "float32", None, 1 << 22, None, "back"),
    ("bfloat16", "float16", 0, 1 << 16, DictStore, "selective"),
    ("float16", "bfloat16", None, 0, None, None),
]


@pytest.mark.parametrize("case", few_of(CASES, 1), ids=str)
def test_random_operations(case, tmp_path):
    seed = 7
    print(f"seed {seed}")
    dtype, states, history, host_bytes, store, policy = case
    tiers = None
    if host_bytes:
        stored = {"store": store(seed) if store is FaultyStore else store()} if store else {}
        named = {"model_id": "m", "lookup_timeout": 5.0} if store else {}
        tiers = pkv.PrefixCacheConfig(host_bytes=host_bytes, write_policy=policy, **stored, **named)
    options = {"checkpoint_tokens": 8, "history_tokens": history, "state_dtype": states}
    world = HybridWorld(seed, dtype, tiers, tmp_path, **options)
    for _ in range(700):
        world.do()
    print(world.counts)
    for name in ("steps", "aborts", "forks", "pops", "lists", "blocks", "budgets"):
        assert world.counts[name] > 8, name
    for name in ("commits", "files", "forgotten", "reused", "hints"):
        assert world.counts[name] > 1, name


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
