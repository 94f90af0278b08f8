# SPDX-License-Identifier: Apache-2.0
"""The global functions that take a sequence out of a cache and into another."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm_ffi import Shape, get_global_func

import tvm_pagedkv as pkv

from ..reference.checkpoint import page_group
from ..support.cases.caches.checkpoint_cases import (
    LAYERS,
    Fed,
    call,
    export,
    fed_in_chunks,
    restore,
)
from ..support.cases.caches.tree_cache_cases import TreePair
from ..support.emulators.python_kernels import make_cache, snapshot
from ..support.emulators.stock import create_positional, stock_kernels
from ..support.worlds.permissive_steps import permissive_step

STATE = "vm.builtin.kv_state_"


CHUNKS = {"empty": (), "one": (1,), "page": (4,), "page+1": (3, 2), "long": (20, 1, 1, 9, 6, 1)}


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", list(CHUNKS))
@pytest.mark.parametrize("kind", list(LAYERS))
def test_page_groups_restore_bit_for_bit(kind, chunks, page_size, kv_dtype):
    fields = {"page_size": page_size, "kv_dtype": kv_dtype}
    source = fed_in_chunks(kind, CHUNKS[chunks], **fields)
    source.check(3)
    checkpoint = export(source.cache, 3)
    target = Fed(kind, seed=1, **fields, max_total_tokens=96, max_num_sequences=3)
    target.add(1)
    target.step({1: 10})
    order = np.random.default_rng(0).permutation(len(checkpoint[1]))
    restore(target.cache, 5, checkpoint, [int(i) for i in order])
    target.rows[5] = list(source.rows[3])
    target.check(5)
    target.check(1)
    again = export(target.cache, 5)
    assert json.loads(again[0]) == json.loads(checkpoint[0]) | {"seq_id": 5}
    for ours, theirs in zip(again[1], checkpoint[1], strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_bfloat16_of_any_bits():
    caches = [make_cache(kv_dtype="bfloat16") for _ in range(2)]
    caches[0].add_sequence(0)
    with permissive_step(caches[0], [0], [10]):
        pass
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 2, 10, 2, 8), "uint16")
    k, v = bits.view(ml_dtypes.bfloat16)
    caches[0].debug_set_kv(0, 0, k, v)
    checkpoint = export(caches[0], 0)
    restore(caches[1], 0, checkpoint)
    for layer in range(2):
        expected = page_group((k[layer], v[layer]), 0, 4).tobytes()
        assert checkpoint[1][layer].numpy().tobytes() == expected
        assert export(caches[1], 0)[1][layer].numpy().tobytes() == expected


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("seed", range(3))
def test_forks_pops_and_slides(kind, seed):
    rng = np.random.default_rng(seed)
    source = fed_in_chunks(kind, (20, 7), seed)
    source.fork(3, 4)
    source.step({3: 3, 4: 6}, salt=1)
    for seq_id, n in ((3, int(rng.integers(1, 12))), (4, 5)):
        source.pop(seq_id, n)
    source.fork(4, 5)
    source.step({5: int(rng.integers(1, 9))}, salt=2)
    target = Fed(kind, seed=seed + 7, max_total_tokens=400)
    for seq_id in (5, 3, 4):
        source.check(seq_id)
        restore(target.cache, seq_id, export(source.cache, seq_id))
        target.rows[seq_id] = list(source.rows[seq_id])
        target.check(seq_id)
    # They go on alike, in one batch and after another pop, and so do forks of them.
    for each in (source, target):
        each.pop(4, 3)
        each.fork(5, 6)
    for lengths in ({3: 1, 4: 1, 5: 1}, {5: 6, 3: 2, 6: 1}, {4: 9}):
        for ours, theirs in zip(source.step(lengths), target.step(lengths), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for seq_id in (3, 4, 5, 6):
        target.check(seq_id)


def test_several_imports_at_a_time_beside_steps():
    source = fed_in_chunks("mixed", (9, 5))
    source.step({-8: 7})
    target = Fed("mixed", seed=2)
    target.add(1)
    checkpoints = {3: export(source.cache, 3), -8: export(source.cache, -8)}
    for seq_id, (metadata, _) in checkpoints.items():
        call("prepare_import", target.cache, seq_id, metadata)
    for group_id in range(len(LAYERS["mixed"])):
        target.step({1: 3})
        for seq_id, (_, groups) in checkpoints.items():
            call("import_page_group", target.cache, seq_id, group_id, groups[group_id])
        target.check(1)
    assert target.cache.stats()["num_importing_sequences"] == 2
    assert target.cache.sequence_ids() == [1]
    call("finish_import", target.cache, 3)
    assert target.cache.sequence_ids() == [1, 3]
    call("finish_import", target.cache, -8)
    for seq_id in (3, -8):
        target.rows[seq_id] = list(source.rows[seq_id])
        target.check(seq_id)


@pytest.mark.parametrize("windows", [(0, 0), (6, 6)])
def test_trees_must_be_committed_first(windows):
    pair = TreePair(windows)
    pair.add(0)
    pair.step({0: 30})
    metadata, groups = export(pair.cache, 0)
    pair.step({0: [-1, 0, 0, 1, 2]})
    before = pair.snapshot()
    with pytest.raises(ValueError, match="5 tree nodes that are not committed"):
        call("get_checkpoint_metadata", pair.cache, 0)
    with pytest.raises(ValueError, match="5 tree nodes that are not committed"):
        call("export_page_group", pair.cache, 0, 0, groups[0])
    assert pair.snapshot() == before
    pair.commit({0: 4})
    checkpoint = export(pair.cache, 0)
    pair.cache.remove_sequence(0)
    restore(pair.cache, 0, checkpoint)
    pair.cache.check_integrity()
    pair.check_rows()
    pair.step({0: [-1, 0, 0]})  # attends as if nothing had happened


# --- wrong calls --------------------------------------------------------------------------------


@pytest.fixture
def half():
    """A cache with sequence 1, sequence 2, which is empty, and half of an import as sequence 5."""
    source = fed_in_chunks("mixed", (9, 5))
    checkpoint = export(source.cache, 3)
    target = Fed("mixed", seed=2, max_num_sequences=4)
    target.add(1)
    target.add(2)
    target.step({1: 6})
    call("prepare_import", target.cache, 5, checkpoint[0])
    for group_id in (0, 1, 2):
        call("import_page_group", target.cache, 5, group_id, checkpoint[1][group_id])
    return target, checkpoint


def _half(group):
    return tvm.runtime.empty(group.shape, "float16")


def state(cache) -> dict:
    tables = [cache.page_table(5, g) for g in range(len(cache.stats()["groups"]))]
    return {"importing": tables, **snapshot(cache, cache.sequence_ids())}


WRONG = {
    "step": (ValueError, "being imported", lambda c, m, g: c.begin_forward([5], [1])),
    "fork": (ValueError, "being imported", lambda c, m, g: c.fork_sequence(5, 6)),
    "fork_to": (ValueError, "in the cache already", lambda c, m, g: c.fork_sequence(1, 5)),
    "pop": (ValueError, "being imported", lambda c, m, g: c.pop_n(5, 1)),
    "add": (ValueError, "in the cache already", lambda c, m, g: c.add_sequence(5)),
    "length": (ValueError, "being imported", lambda c, m, g: c.sequence_length(5)),
    "metadata": (ValueError, "being imported", lambda c, m, g: export(c, 5)),
    "export": (ValueError, "being imp", lambda c, m, g: call("export_page_group", c, 5, 0, g[0])),
    "finish": (ValueError, "lacks page group 3", lambda c, m, g: call("finish_import", c, 5)),
    "finish_other": (ValueError, "no import", lambda c, m, g: call("finish_import", c, 1)),
    "finish_none": (KeyError, "no sequence 9", lambda c, m, g: call("finish_import", c, 9)),
    "prepare_twice": (ValueError, "already", lambda c, m, g: call("prepare_import", c, 5, m)),
    "prepare_taken": (ValueError, "already", lambda c, m, g: call("prepare_import", c, 1, m)),
    "prepare_none": (TypeError, "str", lambda c, m, g: call("prepare_import", c, 6, None)),
    "prepare_text": (ValueError, "byte 0 of 0", lambda c, m, g: call("prepare_import", c, 6, "")),
    "again": (ValueError, "already", lambda c, m, g: call("import_page_group", c, 5, 0, g[0])),
    "group": (IndexError, "group 5", lambda c, m, g: call("import_page_group", c, 5, 5, g[4])),
    "group_-1": (IndexError, "-1", lambda c, m, g: call("import_page_group", c, 5, -1, g[4])),
    "shape": (ValueError, "shape", lambda c, m, g: call("import_page_group", c, 5, 3, g[2])),
    "none": (
        TypeError,
        "must be a tensor",
        lambda c, m, g: call("import_page_group", c, 5, 3, None),
    ),
    "sequence": (ValueError, "no import", lambda c, m, g: call("import_page_group", c, 1, 0, g[0])),
    "unknown": (KeyError, "no sequence", lambda c, m, g: call("import_page_group", c, 9, 0, g[0])),
    "export_group": (IndexError, "5", lambda c, m, g: call("export_page_group", c, 1, 5, g[0])),
    "export_shape": (ValueError, "shape", lambda c, m, g: call("export_page_group", c, 1, 0, g[0])),
    "export_none": (
        TypeError,
        "must be a tensor",
        lambda c, m, g: call("export_page_group", c, 1, 0, None),
    ),
    "export_id": (
        KeyError,
        "no sequence 9",
        lambda c, m, g: call("export_page_group", c, 9, 0, g[0]),
    ),
    "metadata_id": (
        KeyError,
        "no sequence 9",
        lambda c, m, g: call("get_checkpoint_metadata", c, 9),
    ),
    "dtype": (
        ValueError,
        "be float32, got float16",
        lambda c, m, g: call("import_page_group", c, 5, 4, _half(g[4])),
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_call_changes_nothing(half, name):
    target, (metadata, groups) = half
    error, text, wrong = WRONG[name]
    before = state(target.cache)
    with pytest.raises(error, match=text):
        wrong(target.cache, metadata, groups)
    assert state(target.cache) == before
    target.cache.check_integrity()
    for group_id in (4, 3):  # the import goes on
        call("import_page_group", target.cache, 5, group_id, groups[group_id])
    call("finish_import", target.cache, 5)
    assert [x.numpy().tobytes() for x in export(target.cache, 5)[1]] == [
        x.numpy().tobytes() for x in groups
    ]


def test_nothing_of_it_within_a_step(half):
    target, (metadata, groups) = half
    calls = [
        lambda: export(target.cache, 1),
        lambda: call("export_page_group", target.cache, 1, 0, groups[0]),
        lambda: call("prepare_import", target.cache, 7, metadata),
        lambda: call("import_page_group", target.cache, 5, 3, groups[3]),
        lambda: call("finish_import", target.cache, 5),
        lambda: target.cache.remove_sequence(5),
    ]
    with permissive_step(target.cache, [1], [1]):
        for each in calls:
            with pytest.raises(ValueError, match="within a step; call end_forward first"):
                each()


@pytest.mark.parametrize("give_up", ["remove", "clear"])
def test_half_an_import_can_be_given_up(half, give_up):
    target, checkpoint = half
    if give_up == "remove":
        target.cache.remove_sequence(5)
        target.check(1)
        target.cache.remove_sequence(1)
        target.cache.remove_sequence(2)
    else:
        target.cache.clear()
    target.cache.check_integrity()
    stats = target.cache.stats()
    assert stats["num_used_pages"] == stats["total_tokens"] == stats["num_sequences"] == 0
    restore(target.cache, 5, checkpoint)
    target.cache.check_integrity()


def test_an_empty_sequence_may_be_the_target(half):
    target, checkpoint = half
    target.cache.remove_sequence(5)
    restore(target.cache, 2, checkpoint)
    assert target.cache.sequence_length(2) == 14


def test_too_few_pages():
    source = fed_in_chunks("mixed", (30, 20))
    metadata, groups = export(source.cache, 3)
    target = Fed("mixed", max_total_tokens=60, max_num_sequences=2)
    target.add(1)
    target.step({1: 11})
    before = snapshot(target.cache, [1])
    with pytest.raises(pkv.CacheFullError, match="the import needs 13 pages, but 12 of 15 are"):
        call("prepare_import", target.cache, 3, metadata)
    assert snapshot(target.cache, [1]) == before
    target.cache.pop_n(1, 3)
    restore(target.cache, 3, (metadata, groups))
    target.cache.check_integrity()


# --- the cache inside apache-tvm ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stock():
    """A stock cache that holds 21 positions as sequence 0, and one of ours that is empty."""
    config = pkv.KVCacheConfig(
        num_layers=2, num_qo_heads=4, num_kv_heads=2, qk_head_dim=16, dtype="float32",
        max_num_sequences=4, max_total_tokens=256, prefill_chunk_size=64,
        rope=pkv.RopeConfig(theta=12345.6),
    )  # fmt: skip
    kernels = stock_kernels(4, 2, 16, "float32", num_layers=2, rope_theta=12345.6)
    pkv.use_stock_runtime()
    try:
        cache = create_positional(config, kernels, "tirx")
    finally:
        pkv.use_pagedkv_runtime()
    _append(cache, 21)
    return cache, create_positional(config, kernels, "tirx")


def _append(cache, length: int) -> None:
    get_global_func(STATE + "add_sequence")(cache, 0)
    get_global_func(STATE + "begin_forward")(cache, Shape([0]), Shape([length]))
    qkv = np.random.default_rng(0).standard_normal((length, 8, 16)).astype("float32")
    for layer in range(2):
        out = tvm.runtime.empty((length, 4, 16), "float32")
        call("attention_with_fused_qkv", cache, layer, 0.25, tvm.runtime.tensor(qkv), out)
    get_global_func(STATE + "end_forward")(cache)


def test_the_stock_cache_exports_the_same(stock):
    theirs, ours = stock
    ours.clear()
    _append(ours, 21)
    their_text, their_groups = export(theirs, 0)
    our_text, our_groups = export(ours, 0)
    left, right = json.loads(their_text), json.loads(our_text)
    for name in ("format_version", "page_size", "num_layers", "layer_begin", "layer_end", "dtype",
                 "attn_kinds", "seq_id", "seq_length", "logical_pages"):  # fmt: skip
        assert left[name] == right[name], name
    for group in right["groups"]:
        assert group.pop("first_position") == 0
    assert left["groups"] == right["groups"]
    k, v = (x.numpy() for x in ours.debug_get_kv(0))
    for layer in range(2):
        expected = page_group((k[layer], v[layer]), 0, 16)
        assert our_groups[layer].numpy().tobytes() == expected.tobytes()
        np.testing.assert_allclose(their_groups[layer].numpy(), expected, atol=1e-6)


def test_checkpoints_of_the_stock_cache_can_be_read(stock):
    theirs, ours = stock
    ours.clear()
    checkpoint = export(theirs, 0)
    restore(ours, 7, checkpoint)
    for left, right in zip(export(ours, 7)[1], checkpoint[1], strict=True):
        assert left.numpy().tobytes() == right.numpy().tobytes()
    metadata = json.loads(checkpoint[0])
    for field, value in {
        "rotary_theta": 1e4,
        "rotary_scale": 2.0,
        "rope_mode": "inline",
        "num_kv_heads": 1,
        "qk_head_dim": 32,
        "dtype": "float16",
        "has_rope_ext_factors": True,
        "attn_kinds": ["mha", "mha_sliding"],
    }.items():
        with pytest.raises(ValueError, match="another layout"):
            call("prepare_import", ours, 8, json.dumps(metadata | {field: value}))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
