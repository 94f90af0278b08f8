# SPDX-License-Identifier: Apache-2.0
"""Counters, statistics, and the memory that a configuration foretells."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from ...support.emulators.python_kernels import KERNELS, MLA_KERNELS, copy_pages, make_cache
from ...support.worlds.permissive_steps import permissive_step


def test_counters():
    cache = make_cache()
    assert cache.is_empty and cache.total_length() == 0
    assert cache.num_available_pages() == 16
    cache.add_sequence(5)
    assert not cache.is_empty
    with permissive_step(cache, [5], [9]):
        assert cache.is_in_forward
        assert cache.sequence_length(5) == 9  # grows when the step begins
    cache.fork_sequence(5, -6, 7)
    assert (cache.total_length(), cache.num_available_pages()) == (16, 13)
    assert cache.page_table(5) == [0, 1, 2]
    assert cache.page_table(-6) == [0, 1]
    assert cache.sequence_ids() == [-6, 5]
    assert cache.draw().splitlines() == [
        "group 0: 3 of 16 pages in use",
        "  sequence -6 (7): 0* 1*",
        "  sequence 5 (9): 0* 1* 2",
    ]
    stats = cache.stats()
    assert stats["num_pages"] == stats["num_free_pages"] + stats["num_used_pages"] == 16
    assert stats["num_shared_pages"] == 2
    assert (stats["num_sequences"], stats["total_tokens"], stats["num_forwards"]) == (2, 16, 1)
    assert stats["groups"][0]["num_used_pages"] == 3
    assert stats["aux_bytes_copied"] == 0  # on a CPU
    cache.clear()
    assert cache.is_empty and cache.num_available_pages() == 16
    assert cache.stats()["num_forwards"] == 1


def test_pages_of_a_lone_sequence_lie_in_order():
    cache = make_cache()
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
        with permissive_step(cache, [seq_id], [10]):
            pass
    cache.remove_sequence(0)
    cache.add_sequence(2)
    with permissive_step(cache, [2], [12]):
        pass
    assert cache.page_table(2) == [0, 1, 2]  # those of the first one, which nothing can find


CONFIGS = {
    "small": {},
    "odd": {
        "num_qo_heads": 6, "num_kv_heads": 3, "qk_head_dim": 24, "page_size": 1,
        "max_total_tokens": 101, "prefill_chunk_size": 13, "max_num_sequences": 7,
    },
    "few_rows": {"prefill_chunk_size": 3, "max_num_sequences": 100},
    "mixed_types": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "groups": {
        "layers": [
            pkv.LayerSpec(),
            pkv.LayerSpec(num_kv_heads=1),
            pkv.LayerSpec(num_qo_heads=16, qk_head_dim=8, v_head_dim=8),
            pkv.LayerSpec(rope=pkv.RopeConfig(theta=1e6)),
        ],
        "num_layers": 4,
    },
    "windows": {
        "layers": [
            pkv.LayerSpec(),
            pkv.LayerSpec("mha_sliding", 40),
            pkv.LayerSpec("mha_sliding", 3),
            pkv.LayerSpec("mha_sliding", 40),
        ],
        "num_layers": 4, "max_num_sequences": 3, "prefill_chunk_size": 60,
    },
    "mla": {
        "layers": [
            pkv.LayerSpec("mla", v_head_dim=8),
            pkv.LayerSpec("mla", qk_head_dim=40, v_head_dim=32),
        ],
    },
    "mha_and_mla": {
        "layers": [
            pkv.LayerSpec(),
            pkv.LayerSpec(
                "mla", num_qo_heads=9, v_head_dim=8,
                mla_original_qk_head_dim=24, mla_original_v_head_dim=16,
            ),
        ],
        "page_size": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_memory_bytes_is_what_is_allocated(name, aux_manager):
    fields = {"num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 16}
    config = pkv.KVCacheConfig(**{**fields, "max_total_tokens": 1000, **CONFIGS[name]})
    cache = make_cache(
        {**MLA_KERNELS, "copy_pages": copy_pages},
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        max_num_sequences=config.max_num_sequences,
        prefill_chunk_size=config.prefill_chunk_size,
        dtype=config.dtype,
        kv_dtype=config.resolved().kv_dtype,
        aux_manager=aux_manager,
        layers=[
            {
                "kind": spec.kind,
                "window": spec.window,
                "num_qo_heads": spec.num_qo_heads,
                "num_kv_heads": spec.num_kv_heads,
                "qk_head_dim": spec.qk_head_dim,
                "v_head_dim": spec.v_head_dim,
            }
            for spec in config.resolved().layers
        ],
    )
    stats = cache.stats()
    assert stats["allocated_bytes"] == config.memory_bytes()
    parts = stats["page_pool_bytes"] + stats["workspace_bytes"] + stats["aux_bytes"]
    assert stats["allocated_bytes"] == parts
    cache.add_sequence(0)
    for length in (min(config.prefill_chunk_size, 60), 1):
        with permissive_step(cache, [0], [length]):
            pass
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()


def test_page_tables_may_be_held_across_steps():
    seen = []

    def prefill(*args):
        seen.append((args[4], args[4].numpy().copy()))
        KERNELS["prefill"](*args)

    cache = make_cache({"prefill": prefill})
    cache.add_sequence(0)
    for length in (5, 2, 7):
        with permissive_step(cache, [0], [length]):
            cache.attention(0, np.ones((length, 8, 8), "float32"))
    assert [copy.tolist() for _, copy in seen] == [[0, 1], [0, 1], [0, 1, 2, 3]]
    assert [len(tensor.numpy()) for tensor, _ in seen] == [2, 2, 4]


def test_integrity_is_checked_on_demand():
    cache = make_cache()
    cache.add_sequence(0)
    with permissive_step(cache, [0], [4]):
        cache.check_integrity()
    cache.check_integrity()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
