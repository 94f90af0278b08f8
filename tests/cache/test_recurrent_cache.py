# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers and short convolutions of a cache: states are those of a sequence's tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tests.reference.recurrent import recurrence

NUM_TOKENS = 24  # of the vocabulary; what a layer gets of a token is its embedding
PAGE_SIZE = 4


@dataclass
class Layer:
    """A recurrent layer with a convolution, and what it gets of each token."""

    config: pkv.RecurrentConfig
    conv: pkv.ConvConfig
    dtype: str
    rng: np.random.Generator
    tables: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        config, rng = self.config, self.rng
        heads, key_heads = (config.num_heads,), (config.num_key_heads, config.key_dim)
        gates = (*heads, config.key_dim) if config.has_channel_decay else heads
        keys = rng.standard_normal((NUM_TOKENS, *key_heads))
        self.tables = {
            "q": rng.standard_normal((NUM_TOKENS, *key_heads)).astype(self.dtype),
            "k": (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(self.dtype),
            "v": rng.standard_normal((NUM_TOKENS, *heads, config.value_dim)).astype(self.dtype),
            "log_decay": -rng.exponential(0.1, (NUM_TOKENS, *gates)).astype("float32"),
            "x": rng.standard_normal((NUM_TOKENS, self.conv.channels)).astype(self.dtype),
        }
        if config.has_beta:
            self.tables["beta"] = rng.uniform(0, 1, (NUM_TOKENS, *heads)).astype("float32")
        shape = (self.conv.channels, self.conv.width)
        self.weight = rng.standard_normal(shape).astype(self.dtype)
        self.bias = rng.standard_normal(self.conv.channels).astype(self.dtype)

    def run(self, cache: pkv.KVCache, layer: int, tokens: list[int]) -> tuple:
        """Call the layer for the rows of a step."""
        rows = {name: table[tokens] for name, table in self.tables.items()}
        bias = self.bias if self.conv.has_bias else None
        convolved = cache.conv(layer, rows.pop("x"), self.weight, bias)
        return cache.recurrent(layer, **rows), convolved

    def expected(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return both outputs for all tokens of a text."""
        rows = {name: table[tokens] for name, table in self.tables.items()}
        config, x = self.config, rows.pop("x").astype(np.float64)
        state = np.zeros((config.num_heads, config.key_dim, config.value_dim))
        beta = rows.pop("beta", None)
        o, _ = recurrence(**rows, beta=beta, state=state, scale=config.key_dim**-0.5)
        width = self.conv.width
        padded = np.concatenate([np.zeros((width - 1, self.conv.channels)), x])
        windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=0)
        convolved = np.einsum("tcw,cw->tc", windows, self.weight.astype(np.float64))
        if self.conv.has_bias:
            convolved += self.bias.astype(np.float64)
        if self.conv.activation == "silu":
            convolved = convolved / (1 + np.exp(-convolved))
        return o, convolved


@dataclass
class Text:
    """A sequence as it should be."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # of a token tree
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Return the tokens of the text up to a node of its tree."""
        found = []
        while node >= 0:
            found.append(self.nodes[node])
            node = self.parents[node]
        return [*self.tokens, *reversed(found)]


class World:
    """A cache with random operations, and the texts that its sequences should have."""

    def __init__(
        self, seed: int, dtype: str, prefix_cache: pkv.PrefixCacheConfig | None = None, **options
    ):
        self.rng = np.random.default_rng(seed)
        self.layers = {
            1: Layer(
                pkv.RecurrentConfig("gated_delta", 4, 2, 16, 24, **options),
                pkv.ConvConfig(40, 4, "silu"),
                dtype,
                self.rng,
            ),
            2: Layer(
                pkv.RecurrentConfig("kda", 2, 2, 8, 16, **options),
                pkv.ConvConfig(24, 3, None, has_bias=True),
                dtype,
                self.rng,
            ),
            4: Layer(
                pkv.RecurrentConfig("mamba2", 4, 1, 8, 8, **options),
                pkv.ConvConfig(40, 4, "silu", has_bias=True),
                dtype,
                self.rng,
            ),
        }
        specs = [
            pkv.LayerSpec("recurrent", recurrent=self.layers[i].config, conv=self.layers[i].conv)
            if i in self.layers
            else pkv.LayerSpec("mha" if i < 3 else "mha_sliding", window=6 if i >= 3 else None)
            for i in range(5)
        ]
        self.config = pkv.KVCacheConfig(
            num_layers=5,
            num_qo_heads=2,
            num_kv_heads=1,
            qk_head_dim=16,
            dtype=dtype,
            kv_dtype="int8",
            page_size=PAGE_SIZE,
            max_num_sequences=4,
            max_total_tokens=320,
            prefill_chunk_size=48,
            layers=specs,
            rope=pkv.RopeConfig(mode="none"),
            prefix_cache=prefix_cache,
        )
        self.cache = pkv.create(self.config)
        self.texts: dict[int, Text] = {}
        self.old: list[list[int]] = []
        self.tolerance = 3e-5 if dtype == "float32" else 2e-2
        self.counts: dict[str, int] = {}

    def do(self) -> None:
        """Do something at random, and compare what comes out of it."""
        seq_id = int(self.rng.integers(7))
        if seq_id not in self.texts:
            operation = self.add
        else:
            names = [
                "remove",
                "remove",
                "fork",
                "fork",
                "fork",
                "pop",
                "pop",
                "tree",
                "tree",
                "commit",
            ]
            operation = getattr(self, str(self.rng.choice([*names, *["step"] * 5])))
        try:
            operation(seq_id)
        except pkv.CacheFullError:
            self.count("full")
            self.remove(next(iter(self.texts)))
        except ValueError as error:
            assert "have been reclaimed" in str(error)
            self.count("reclaimed")
        self.cache.check_integrity()
        tvm.get_global_func("pagedkv.poison_free_pages")(self.cache)

    def count(self, name: str, by: int = 1) -> None:
        """Note that something has happened."""
        self.counts[name] = self.counts.get(name, 0) + by

    def tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        return [int(token) for token in self.rng.integers(NUM_TOKENS, size=count)]

    def add(self, seq_id: int) -> None:
        """Add a sequence, which often begins like an earlier one."""
        tokens = self.tokens(int(self.rng.integers(1, 6)))
        if self.old and self.rng.integers(4):
            old = self.old[int(self.rng.integers(len(self.old)))]
            tokens = old[: int(self.rng.integers(len(old) + 1))] + tokens
        length = self.cache.add_sequence(seq_id, tokens)
        self.count("reused", length)
        self.texts[seq_id] = Text(tokens[:length])

    def remove(self, seq_id: int) -> None:
        """Remove a sequence, whose pages stay where they can be found."""
        self.cache.remove_sequence(seq_id)
        self.old = [*self.old[-20:], self.texts.pop(seq_id).tokens]

    def fork(self, seq_id: int) -> None:
        """Fork a sequence anywhere."""
        text, free = self.texts[seq_id], [i for i in range(7) if i not in self.texts]
        if not free:
            return
        child = free[0]
        position = len(text.tokens)
        if self.rng.integers(3):
            position = int(self.rng.integers(position + 1))
        self.cache.fork_sequence(seq_id, child, position)
        self.texts[child] = Text(text.tokens[:position])
        self.count("forks")

    def pop(self, seq_id: int) -> None:
        """Drop positions, or nodes of a tree."""
        text = self.texts[seq_id]
        size = len(text.tokens) + len(text.nodes)
        count = int(self.rng.integers(min(size, 16) + 1 if self.rng.integers(2) else size + 1))
        self.cache.pop_n(seq_id, count)
        num_nodes = min(count, len(text.nodes))
        kept = len(text.nodes) - num_nodes
        del text.nodes[kept:], text.parents[kept:]
        del text.tokens[len(text.tokens) - (count - num_nodes) :]
        self.count("pops")

    def step(self, _: int) -> None:
        """Append rows to several sequences."""
        lengths = {
            i: int(self.rng.choice([1, 1, 1, 5, 20]))
            for i, text in self.texts.items()
            if not text.nodes and len(text.tokens) < 70 and self.rng.integers(4)
        }
        lengths = dict(list(lengths.items())[:2])
        if not lengths:
            return
        tokens = {i: self.tokens(n) for i, n in lengths.items()}
        wanted = {i: [*self.texts[i].tokens, *tokens[i]] for i in lengths}
        rows = [token for each in tokens.values() for token in each]
        positions = [
            (text, len(text) - n + k)
            for (i, n), text in zip(lengths.items(), wanted.values(), strict=True)
            for k in range(n)
        ]
        recorded = (
            rows
            if all(self.cache.num_recorded_tokens(i) == len(self.texts[i].tokens) for i in lengths)
            else None
        )
        if self.run(lengths, rows, positions, None, recorded):
            for i in lengths:
                self.texts[i].tokens = wanted[i]

    def tree(self, seq_id: int) -> None:
        """Append nodes to the token tree of a sequence."""
        text = self.texts[seq_id]
        if len(text.nodes) > 12 or len(text.tokens) > 70:
            return
        nodes, parents = self.tokens(int(self.rng.integers(1, 7))), []
        for _ in nodes:
            last = len(text.nodes) + len(parents) - 1
            parents.append(last if self.rng.integers(3) else int(self.rng.integers(-1, last + 1)))
        after = Text(text.tokens, [*text.nodes, *nodes], [*text.parents, *parents])
        positions = []
        for node in range(len(text.nodes), len(after.nodes)):
            path = after.path(node)
            positions.append((path, len(path) - 1))
        if self.run({seq_id: len(nodes)}, nodes, positions, parents, None):
            self.texts[seq_id] = after

    def run(self, lengths, rows, positions, parents, recorded) -> bool:
        """Run a step, compare its outputs, and return whether it was kept."""
        is_kept = bool(self.rng.integers(6))
        self.cache.begin_forward(list(lengths), list(lengths.values()), parents, recorded)
        for i in range(5):
            if i not in self.layers:
                qkv = self.rng.standard_normal((len(rows), 4, 16)).astype(self.config.dtype)
                self.cache.attention(i, qkv)
                continue
            outputs = self.layers[i].run(self.cache, i, rows)
            for row, (text, position) in enumerate(positions):
                for got, wanted in zip(outputs, self.wanted(i, text), strict=True):
                    found = got.numpy()[row].astype(np.float64)
                    limit = self.tolerance * (1 + np.abs(wanted[position]))
                    assert (np.abs(found - wanted[position]) < limit).all(), (i, row, position)
        self.cache.end_forward() if is_kept else self.cache.abort_forward()
        self.count("steps" if is_kept else "aborts")
        return is_kept

    def wanted(self, layer: int, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the outputs of a layer for a text; of the last text only once."""
        key = (layer, tuple(text))
        if getattr(self, "_key", None) != key:
            self._key, self._wanted = key, self.layers[layer].expected(text)
        return self._wanted

    def commit(self, seq_id: int) -> None:
        """Commit a path of a token tree."""
        text = self.texts[seq_id]
        if not text.nodes:
            return
        leaf = int(self.rng.integers(-1, len(text.nodes)))
        self.cache.commit_tree([seq_id], [leaf])
        tokens = text.path(leaf) if leaf >= 0 else text.tokens
        self.texts[seq_id] = Text(tokens)
        self.cache.record_tokens(seq_id, tokens[self.cache.num_recorded_tokens(seq_id) :])
        self.count("commits")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("dtype", "history"), [("float32", None), ("float32", 16), ("bfloat16", None)], ids=str
)
def test_random_operations(dtype, history, seed):
    """Some forks and pops reach back to what has been reclaimed, and are refused."""
    print(f"seed {seed}")
    world = World(seed, dtype, checkpoint_tokens=8, history_tokens=history)
    for _ in range(1000):
        world.do()
    print(world.counts)
    for name in ("steps", "aborts", "forks", "pops", "commits", "reused"):
        assert world.counts[name] > 8, name
    assert world.counts["reclaimed"] > 3
    assert world.cache.stats()["allocated_bytes"] == world.config.memory_bytes()
    groups = json.loads(json.dumps(world.cache.stats()))["state_groups"]
    assert [group["num_layers"] for group in groups] == [1, 1, 1]


def test_a_state_has_the_same_bits_however_its_tokens_came():
    """Steps of other sizes, an aborted step, a fork, a pop and a prefix hit at odd positions."""
    world = World(3, "bfloat16", checkpoint_tokens=8)
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


def test_states_come_back_from_disk(tmp_path):
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
        world = World(5, "bfloat16", tiers, checkpoint_tokens=8)
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
    with pytest.raises(ValueError, match="a checkpoint is not possible yet"):
        cache.save("never")
    cache.remove_sequence(0)
    for _ in range(20):
        world.do()


if __name__ == "__main__":
    tvm.testing.main()
