# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers and short convolutions of a cache: states are those of a sequence's tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tvm_pagedkv.cache.page_map import PageMap

from ...support.cases.caches.cache_cases import reserved_bytes, small_hybrid
from ...support.emulators.dict_store import DictStore
from ...support.harness.selections import with_slow
from ...support.worlds.permissive_steps import permissive_step
from ...support.worlds.recurrent_world import NUM_TOKENS, Layer, World, world_config

create = tvm.get_global_func("pagedkv.create")


@pytest.mark.parametrize("seed", with_slow(range(2), 1))
@pytest.mark.parametrize(
    ("dtype", "states", "history"),
    [
        ("float32", "float32", 16),
        pytest.param("float32", "float32", None, marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", None, marks=pytest.mark.slow),
        pytest.param("bfloat16", "bfloat16", 16, marks=pytest.mark.slow),
        pytest.param("float32", "float16", 16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_operations(dtype, states, history, seed):
    """Some forks and pops reach back to what has been reclaimed, and are refused."""
    print(f"seed {seed}")
    options = {"checkpoint_tokens": 8, "history_tokens": history, "state_dtype": states}
    world = World(seed, dtype, **options)
    for _ in range(1000):
        world.do()
    print(world.counts)
    for name in ("steps", "aborts", "forks", "pops", "commits", "reused"):
        assert world.counts[name] > 8, name
    assert world.counts["reclaimed"] > 3
    assert reserved_bytes(world.cache) == world.config.memory_bytes()
    groups = json.loads(json.dumps(world.cache.stats()))["state_groups"]
    assert [group["num_layers"] for group in groups] == [1, 1, 1]


@pytest.mark.parametrize("states", ["float32", "bfloat16", "float16"])
def test_a_state_has_the_same_bits_however_its_tokens_came(states):
    """Steps of other sizes, an aborted step, a fork, a pop and a prefix hit at odd positions."""
    world = World(3, "bfloat16", checkpoint_tokens=8, state_dtype=states)
    cache, layer = world.cache, world.layers[1]
    tokens = world.tokens(45)

    def append(seq_id: int, count: int) -> None:
        begin = cache.sequence_length(seq_id)
        rows = tokens[begin : begin + count]
        with cache.forward([seq_id], [count], tokens=rows):
            outputs[seq_id] = [run(i, rows) for i in range(5)]

    def run(i: int, rows: list[int]):
        if i in world.layers:
            return world.layers[i].run(cache, i, rows)[0].numpy()
        return cache.attention(i, np.zeros((len(rows), 4, 16), "bfloat16")).numpy()

    outputs: dict[int, list] = {}
    cache.add_sequence(0, tokens)
    append(0, 44)
    append(0, 1)
    cache.add_sequence(1, tokens[:1])  # the same, cut into odd pieces, with detours
    for count in (1, 13, 7):
        append(1, count)
    append(1, 20)
    cache.pop_n(1, 18)
    append(1, 9)
    cache.begin_forward([1], [3])
    layer.run(cache, 1, tokens[:3])
    cache.abort_forward()
    cache.fork_sequence(1, 2, 29)
    append(2, 15)
    append(2, 1)
    cache.remove_sequence(0)
    assert cache.add_sequence(3, tokens) == 44  # all but the last token, from another text
    append(3, 1)
    for seq_id in (2, 3):
        for i in world.layers:
            assert np.array_equal(outputs[seq_id][i], outputs[0][i][-1:]), (seq_id, i)


@pytest.mark.parametrize("parents", [None, [-1, 0]])
def test_a_step_without_the_layer_leaves_no_state(parents):
    """Also none of the positions before it, which the step would have computed again."""
    world = World(3, "float32", checkpoint_tokens=8)
    cache, layer, tokens = world.cache, world.layers[1], world.tokens(30)
    cache.add_sequence(0)
    with permissive_step(cache, [0], [7]):
        layer.run(cache, 1, tokens[:7])
        for i in (2, 4):
            world.layers[i].run(cache, i, tokens[:7])
        for i in (0, 3):
            cache.attention(i, np.zeros((7, 4, 16), "float32"))
    cache.pop_n(0, 2)
    with permissive_step(cache, [0], [2], parents):
        pass
    cache.check_integrity()
    cache.pop_n(0, 2)
    with permissive_step(cache, [0], [1]):
        o = layer.run(cache, 1, tokens[5:6])[0].numpy()
    wanted = layer.expected(tokens[:6])[0][-1:]
    assert np.abs(o - wanted).max() < 3e-5


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_states_come_back_from_disk(tmp_path, states):
    """A text is computed in one cache, and continued in another one that finds it on disk."""
    tiers = pkv.PrefixCacheConfig(
        host_bytes=1 << 20,
        disk_path=tmp_path,
        model_id="m",
        write_policy="through",
        lookup_timeout=30.0,
    )
    outputs = []
    for is_first in (True, False):
        world = World(5, "bfloat16", tiers, checkpoint_tokens=8, state_dtype=states)
        cache, tokens = world.cache, world.tokens(45)
        found = cache.add_sequence(0, tokens)
        assert found == (0 if is_first else 44)  # 11 pages, of which 40 tokens have a state behind
        for count in (44 - found, 1):
            if count == 0:
                continue
            begin = cache.sequence_length(0)
            rows = tokens[begin : begin + count]
            with cache.forward([0], [count], tokens=rows):
                last = [
                    world.layers[i].run(cache, i, rows)[0].numpy()[-1:]
                    if i in world.layers
                    else cache.attention(i, np.zeros((count, 4, 16), "bfloat16")).numpy()[-1:]
                    for i in range(5)
                ]
        outputs.append(last)
        cache.check_integrity()
        cache.remove_sequence(0)
        assert cache.close_prefixes()
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


def test_layers_share_values_only_with_those_of_their_group():
    """Histories of different lengths separate layers into groups; a value holds one group."""
    values, rng = {}, np.random.default_rng(7)
    shape = pkv.RecurrentConfig("mamba2", 1, 1, 8, 8, checkpoint_tokens=8)
    layers = [Layer(shape, pkv.ConvConfig(24, 4), "float32", rng) for _ in range(4)]
    tokens = [int(token) for token in rng.integers(NUM_TOKENS, size=18)]
    cases = (
        ((None, 16, 16, None), 0),
        ((None, None, 16, 16), 0),  # as many layers in each group, but other ones
        ((16, None, None, 16), 16),  # groups as in the first cache
        ((None, None, None, None), 0),
        ((16, 16, 16, 16), 16),
    )
    for history, found in cases:
        config = pkv.KVCacheConfig(
            num_layers=4,
            num_qo_heads=1,
            num_kv_heads=1,
            qk_head_dim=8,
            dtype="float32",
            page_size=4,
            max_num_sequences=1,
            max_total_tokens=64,
            prefill_chunk_size=32,
            layers=[
                pkv.LayerSpec(
                    "recurrent", recurrent=replace(shape, history_tokens=each), conv=layer.conv
                )
                for each, layer in zip(history, layers, strict=True)
            ],
            prefix_cache=pkv.PrefixCacheConfig(
                host_bytes=1 << 20,
                store=DictStore(values),
                model_id="m",
                write_policy="through",
                lookup_timeout=30.0,
            ),
        )
        cache = pkv.create(config)
        reused = cache.add_sequence(0, tokens)
        rows = tokens[reused:]
        with cache.forward([0], [len(rows)], tokens=rows):
            for i, layer in enumerate(layers):
                outputs = layer.run(cache, i, rows)
                for output, wanted in zip(outputs, layer.expected(tokens), strict=True):
                    assert np.abs(output.numpy() - wanted[reused:]).max() < 3e-5, history
        assert reused == found, history
        cache.check_integrity()
        assert cache.close_prefixes()


def test_running_sequences_go_back_anywhere_within_the_capacity():
    """24 sequences share a prefix and fork and pop at random, beside texts that come and go."""
    config = world_config("float32", checkpoint_tokens=16)
    config = replace(
        config,
        num_layers=2,
        layers=[config.layers[1], pkv.LayerSpec("mha")],
        kv_dtype=None,
        max_num_sequences=24,
        max_total_tokens=900,
    )
    cache, rng = pkv.create(config), np.random.default_rng(9)
    layer = Layer(config.layers[0].recurrent, config.layers[0].conv, "float32", rng)
    qkv = np.zeros((48, 4, 16), "float32")
    texts: dict[int, list[int]] = {}

    def append(seq_id: int, tokens: list[int], check: bool = True) -> None:
        texts[seq_id] += tokens
        with cache.forward([seq_id], [len(tokens)], tokens=tokens):
            outputs = layer.run(cache, 0, tokens)
            cache.attention(1, qkv[: len(tokens)])
        for found, wanted in zip(outputs, layer.expected(texts[seq_id]), strict=True):
            wanted = wanted[-len(tokens) :]
            assert not check or np.abs(found.numpy() - wanted).max() < 3e-5, seq_id

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(NUM_TOKENS, size=count)]

    texts[0] = []
    cache.add_sequence(0, [])
    append(0, tokens(40))
    for seq_id in range(1, 24):
        cache.fork_sequence(0, seq_id)
        texts[seq_id] = list(texts[0])
    for turn in range(400):
        seq_id, length = int(rng.integers(24)), int(rng.integers(1, 56))
        if turn % 8 == 0:  # a text that nobody runs any more, as long as there is room
            texts[99] = []
            cache.add_sequence(99, [])
            append(99, tokens(32), check=False)
            cache.remove_sequence(99)
        if length > len(texts[seq_id]):
            append(seq_id, tokens(min(length - len(texts[seq_id]), 24)))
        elif turn % 2:
            cache.pop_n(seq_id, len(texts[seq_id]) - length)
            texts[seq_id] = texts[seq_id][:length]
            append(seq_id, tokens(1))
        else:
            child = (seq_id + 1) % 24
            cache.remove_sequence(child)
            cache.fork_sequence(seq_id, child, length)
            texts[child] = texts[seq_id][:length]
            append(child, tokens(1))
    stats = cache.stats()
    assert stats["groups"][0]["num_reclaimed_pages"] > 50
    cache.check_integrity()


def test_a_bundle_has_recurrent_layers(tmp_path):
    """Its caches may have other capacities than those that it was written for."""
    world = World(2, "float32", checkpoint_tokens=8, history_tokens=16)
    config = replace(world.config, max_total_tokens=4096, max_num_sequences=3)
    capacities = {"max_total_tokens": 4096, "max_num_sequences": 3}
    bundle = pkv.load_bundle(pkv.write_bundle(world.config, tmp_path / "bundle"))
    cache, tokens = bundle.create(**capacities), world.tokens(30)
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    world.cache.add_sequence(0)
    cache.add_sequence(0)
    for each in (world.cache, cache):
        each.begin_forward([0], [30])
    for i, layer in world.layers.items():
        for one, other in zip(
            layer.run(cache, i, tokens), layer.run(world.cache, i, tokens), strict=True
        ):
            assert np.array_equal(one.numpy(), other.numpy())


def test_refused_calls_change_nothing():
    world = World(0, "float32", checkpoint_tokens=8)
    cache, layer = world.cache, world.layers[1]
    rows = {name: table[[1, 2]] for name, table in layer.tables.items()}
    x = rows.pop("x")
    cache.add_sequence(0)
    with pytest.raises(ValueError, match="recurrent"):
        cache.recurrent(1, **rows)  # outside a step
    cache.begin_forward([0], [2])
    for call, message in (
        (lambda: cache.recurrent(0, **rows), "layer 0 is no recurrent layer"),
        (lambda: cache.recurrent(1, **{**rows, "beta": None}), "beta must be a tensor"),
        (lambda: cache.recurrent(1, **{**rows, "q": rows["q"][:1]}), "q must have shape"),
        (lambda: cache.recurrent(4, **rows), "q must have shape"),
        (lambda: cache.conv(0, x, layer.weight), "layer 0 has no short convolution"),
        (lambda: cache.conv(1, x, layer.weight[:, :3]), "weight must have shape"),
        (lambda: cache.conv(1, x, layer.weight, layer.bias), "bias must be left out"),
        (lambda: cache.attention(1, np.zeros((2, 4, 16), "float32")), "is a recurrent layer"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    cache.conv(1, x, layer.weight)
    cache.recurrent(1, **rows)
    with pytest.raises(ValueError, match="in this step already"):
        cache.recurrent(1, **rows)
    cache.abort_forward()
    cache.remove_sequence(0)
    for _ in range(20):
        world.do()


def test_what_shows_a_cache_knows_recurrent_layers():
    """Attention keeps all positions; ingredients and rows of convolutions have groups of theirs."""
    world = World(1, "float32", checkpoint_tokens=8)
    cache, tokens = world.cache, world.tokens(40)
    cache.add_sequence(0)
    with cache.forward([0], [40]):
        for i in range(5):
            if i in world.layers:
                world.layers[i].run(cache, i, tokens)
            else:
                cache.attention(i, np.zeros((40, 4, 16), "float32"))
    assert repr(cache).startswith("<KVCache: 5 layers, 1 sequences, 40 tokens, ")
    page_map = PageMap.of(cache)
    kinds = [group.kind for group in page_map.groups]
    assert sorted(kinds) == ["conv"] * 2 + ["mha", "mha_sliding"] + ["recurrent"] * 3
    text = page_map.to_text()
    assert text.count("sequence 0 (40): ") == 7
    cache.fork_sequence(0, 1, 32)
    cache.fork_sequence(0, 2)
    page_map = PageMap.of(cache)
    assert [group.layers for group in page_map.state_groups] == [(1,), (2,), (4,)]
    states = page_map.state_groups[0]
    assert (states.kind, states.interval, states.window) == ("states", 8, 0)
    # Behind 24, 32 and 40 positions: pops of 16 lead back to the first one.
    assert states.first_positions == {0: 16, 1: 16, 2: 16}
    pages = states.tables[0]
    assert len(pages) == 3 and states.tables == {0: pages, 1: pages[:2], 2: pages}
    assert [states.owners[page] for page in pages] == [(0, 1, 2), (0, 1, 2), (0, 2)]
    assert [states.slots[page] for page in pages] == [8, 8, 8]
    assert states.num_pages == cache.stats()["state_groups"][0]["num_pages"]
    assert len(states.cached) == cache.stats()["state_groups"][0]["num_cached_pages"] == 2
    assert "state group 0: 3 of " in page_map.to_text()
    assert f"  sequence 1 (states): from position 16: {pages[0]}* {pages[1]}*" in page_map.to_text()
    picture = page_map.to_svg()
    assert picture.count('data-state-group="') == 3
    assert "State group 0: layer 1 (states, a state every 8 tokens)" in picture
    assert f"page {pages[2]}: sequences 0, 2; a state behind 8 of its 8 positions" in picture


def test_a_step_without_some_layers_names_each_once():
    world = World(1, "float32", checkpoint_tokens=8)
    world.cache.add_sequence(0)
    with (
        pytest.raises(ValueError, match=r"layers \[0, 1, 2, 4\] of the cache .* `recurrent`"),
        world.cache.forward([0], [1]),
    ):
        world.cache.attention(3, np.zeros((1, 4, 16), "float32"))


def test_rows_of_attention_are_read_from_the_first_one():
    """Also where recurrent layers keep those behind a state only."""
    cache, rng = pkv.create(small_hybrid(checkpoint_tokens=8)), np.random.default_rng(0)
    qkv = rng.standard_normal((40, 3, 8)).astype("float32")
    rows, decays = np.zeros((40, 1, 8), "float32"), np.zeros((40, 1), "float32")
    cache.add_sequence(0)
    with cache.forward([0], [40]):
        cache.recurrent(0, rows, rows, rows, decays)
        cache.attention(1, qkv)
    k, v = cache.debug_get_kv(0)
    assert np.array_equal(k.numpy()[0], qkv[:, 1:2])
    assert np.array_equal(v.numpy()[0], qkv[:, 2:3])


if __name__ == "__main__":
    tvm.testing.main()
