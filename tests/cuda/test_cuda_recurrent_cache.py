# SPDX-License-Identifier: Apache-2.0
"""Caches with recurrent layers on an emulated device: states are those of a sequence's tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv

from .. import reference
from ..support.worlds.recurrent_world import World

pytestmark = pytest.mark.skipif(
    bool(tvm.cuda(0).exist), reason="this machine has the device that is emulated"
)


def world_on(device, seed: int, dtype: str, **options) -> World:
    print(f"seed {seed}")
    create = partial(pkv.create, device=device.device)
    return World(seed, dtype, create=create, checkpoint_tokens=8, **options)


@pytest.mark.parametrize(
    ("dtype", "is_wide", "num_operations"),
    [
        ("bfloat16", False, 120),
        pytest.param("float32", False, 600, marks=pytest.mark.slow),
        pytest.param("float16", False, 600, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, 200, marks=pytest.mark.slow),
    ],
)
def test_random_operations(device, dtype, is_wide, num_operations):
    """Forks, pops and trees reach back to what is computed again, or refused once reclaimed."""
    world = world_on(device, 0, dtype, is_wide=is_wide, history_tokens=16)
    for _ in range(num_operations):
        world.do()
    print(world.counts)
    for name in ("steps", "aborts", "forks", "pops", "commits", "reused"):
        assert world.counts[name] > 0, name


def test_states_come_from_a_file_and_from_disk(device, tmp_path):
    """A text is continued in other caches, anywhere, with the bits of the first one."""
    tiers = pkv.PrefixCacheConfig(
        host_bytes=1 << 20,
        disk_path=tmp_path / "disk",
        model_id="m",
        write_policy="through",
        lookup_timeout=30.0,
    )
    first = world_on(device, 1, "bfloat16", prefix_cache=tiers)
    tokens = first.tokens(30)
    first.cache.add_sequence(0)
    append(first, 0, tokens[:29])
    first.cache.fork_sequence(0, 1, 26)
    expected = append(first, 1, tokens[26:])
    first.cache.save(tmp_path / "kv.safetensors", [0])
    assert first.cache.close_prefixes()
    loaded = world_on(device, 1, "bfloat16")
    loaded.cache.load(tmp_path / "kv.safetensors")
    loaded.cache.pop_n(0, 3)
    found = world_on(device, 1, "bfloat16", prefix_cache=tiers)
    assert found.cache.add_sequence(0, tokens[:27]) == 24  # whole pages
    append(found, 0, tokens[24:26])
    for world in (loaded, found):
        actual = append(world, 0, tokens[26:])
        for one, other in zip(actual, expected, strict=True):
            reference.assert_same_bits(one, other)
        world.cache.check_integrity()
    assert found.cache.close_prefixes()


def append(world: World, seq_id: int, tokens: list[int]) -> list[np.ndarray]:
    """Return what the recurrent layers make of the next tokens of a sequence."""
    cache, found = world.cache, []
    is_known = cache.num_recorded_tokens(seq_id) == cache.sequence_length(seq_id)
    with cache.forward([seq_id], [len(tokens)], tokens=tokens if is_known else None):
        for i in range(5):
            if i in world.layers:
                found += [x.numpy() for x in world.layers[i].run(cache, i, tokens)]
            else:
                cache.attention(i, np.zeros((len(tokens), 4, 16), "bfloat16"))
    return found


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
