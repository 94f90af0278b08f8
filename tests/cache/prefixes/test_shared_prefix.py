# SPDX-License-Identifier: Apache-2.0
"""Pages that sequences of a step share are read once: counted, and with the same result."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from ... import reference
from ...support.cases.kernels.kernel_specs import parametrize_seed
from ...support.emulators.python_kernels import (
    LAYER,
    make_cache,
    poison,
    share_every_prefix,
    shuffle,
)


class Family:
    """A cache and the reference: a sequence, its forks, their forks; all of one layer."""

    def __init__(self, cache: pkv.KVCache, heads: tuple[int, int], dim: int, dtype: str, seed: int):
        self.cache, self.heads, self.dim, self.dtype = cache, heads, dim, np.dtype(dtype)
        self.expected = reference.ReferenceCache(1, self.dtype)
        self.rng = np.random.default_rng(seed)
        shuffle(cache, seed)

    def add(self, seq_id: int, parent: int | None = None) -> None:
        for holder in (self.cache, self.expected):
            if parent is None:
                holder.add_sequence(seq_id)
            else:
                holder.fork_sequence(parent, seq_id)

    def step(self, seq_ids: list[int], num_rows: int) -> tuple[int, int]:
        """Append rows to each and compare attention; pages read, and without sharing."""
        lengths = [num_rows] * len(seq_ids)
        shape = (sum(lengths), self.heads[0] + 2 * self.heads[1], self.dim)
        qkv = self.rng.standard_normal(shape).astype(self.dtype)
        want, _ = self.expected.attention(0, seq_ids, lengths, qkv, self.heads[1], self.dim**-0.5)
        with self.cache.forward(seq_ids, lengths):
            poison(self.cache)
            got = self.cache.attention(0, qkv).numpy()
        reference.assert_close(got, want, str(self.dtype), f"{seq_ids} {num_rows}")
        stats = self.cache.stats()
        return stats["step_pages_read"], stats["step_pages_read_without_sharing"]


HEADS, DIM = (LAYER["num_qo_heads"], LAYER["num_kv_heads"]), LAYER["qk_head_dim"]


def small_family(seed: int, **fields) -> Family:
    """Pages of 4 slots."""
    cache = make_cache(num_layers=1, max_total_tokens=512, **fields)
    return Family(cache, HEADS, DIM, "float32", seed)


def grow_generations(family: Family) -> None:
    """16 positions for all, 8 for the forks of either kind, 8 for each pair of their forks."""
    family.add(0)
    family.step([0], 16)
    family.add(4, 0)
    family.step([0, 4], 8)
    for parent in (0, 4):
        family.add(parent + 2, parent)
    family.step([0, 2, 4, 6], 8)
    for parent in (0, 2, 4, 6):
        family.add(parent + 1, parent)


@parametrize_seed
def test_pages_read_fall_with_each_level_of_sharing(seed):
    family = small_family(seed)
    share_every_prefix(family.cache)
    grow_generations(family)
    ids = [int(i) for i in family.rng.permutation(8)]
    # 4 pages once, 2 for each of two branches, 2 for each of four pairs, and one each.
    assert family.step(ids, 1) == (4 + 2 * 2 + 4 * 2 + 8, 8 * (4 + 2 + 2 + 1))
    # One branch alone shares six pages on one level; a lone sequence shares nothing.
    assert family.step([0, 1, 2, 3], 1) == (6 + 2 * 2 + 4, 4 * 9)
    assert family.step([5], 1) == (9, 9)
    # A pair has all but the last page in common.
    assert family.step([6, 7], 3) == (8 + 2, 2 * 9)


@parametrize_seed
def test_sharing_can_be_switched_off(seed):
    family = small_family(seed, share_prefix=False)
    share_every_prefix(family.cache)
    grow_generations(family)
    assert family.step(list(range(8)), 1) == (72, 72)


def test_little_is_read_again():
    """A level that saves few positions is not worth a call; its pages count as each one's own."""
    family = small_family(0)
    family.add(0)
    for _ in range(4):
        family.step([0], 32)
    for child in range(1, 5):
        family.add(child, 0)
    assert family.step([0, 1, 2, 3], 1) == (4 * 33, 4 * 33)  # 3 * 128 positions
    assert family.step([0, 1, 2, 3, 4], 1) == (32 + 5, 5 * 33)  # 4 * 128


def test_counters_add_up():
    family = small_family(0)
    share_every_prefix(family.cache)
    grow_generations(family)
    before = family.cache.stats()
    steps = np.array([family.step([0, 1], 1) for _ in range(6)])
    after = family.cache.stats()
    totals = [after[name] - before[name] for name in ("pages_read", "pages_read_without_sharing")]
    assert totals == steps.sum(axis=0).tolist()


CONFIGS = {
    "4:4x64-f32-p16": (4, 4, 64, "float32", 16),
    "8:2x64-bf16-p32": (8, 2, 64, "bfloat16", 32),
    "8:1x40-f16-p1": (8, 1, 40, "float16", 1),
}


@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_kernels(name, share_prefix):
    """Two branches of one prompt, several sequences each: both levels are worth a call."""
    num_qo_heads, num_kv_heads, dim, dtype, page = CONFIGS[name]
    config = pkv.KVCacheConfig(
        num_layers=1, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, qk_head_dim=dim,
        dtype=dtype, page_size=page, max_num_sequences=8, max_total_tokens=2048,
        prefill_chunk_size=512, rope=pkv.RopeConfig(mode="none"), share_prefix=share_prefix,
    )  # fmt: skip
    family = Family(pkv.create(config), (num_qo_heads, num_kv_heads), dim, dtype, 0)
    family.add(0)
    family.step([0], 256)
    family.add(4, 0)
    family.step([0, 4], 192)
    for branch in (0, 4):
        for child in range(1, 4):
            family.add(branch + child, branch)
    first, second = 256 // page, 192 // page
    for num_rows in (1, 3):
        own = -(-(1 if num_rows == 1 else 4) // page)
        apart = 8 * (first + second + own)
        shared = first + 2 * second + 8 * own
        pages = family.step(list(range(8)), num_rows)
        assert pages == (shared if share_prefix else apart, apart)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
