# SPDX-License-Identifier: Apache-2.0
"""A cache with recurrent layers under random operations, and what it should compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import tvm

import tvm_pagedkv as pkv

from ...reference.recurrent import recurrence

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
        dtype = "float64" if config.state_dtype == "float32" else config.state_dtype
        scale = config.key_dim**-0.5
        o, _ = recurrence(**rows, beta=beta, state=state, scale=scale, state_dtype=dtype)
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
    window: int = 0  # positions that attention keeps of it; 0: all
    sinks: int = 0
    dropped: int = 0  # tokens behind the sinks that attention has forgotten

    @property
    def length(self) -> int:
        """Positions that the sequence has."""
        return len(self.tokens) - self.dropped

    def slide(self) -> None:
        """Forget what has left the window."""
        if self.window:
            self.dropped = max(self.dropped, len(self.tokens) - self.window)

    def prefix(self, length: int) -> Text:
        """Return the text of the first positions, which has no window."""
        if length <= self.sinks:
            return Text(self.tokens[:length])
        kept = self.tokens[: length + self.dropped]
        sinks = self.sinks if self.dropped else 0
        return Text(kept, sinks=sinks, dropped=self.dropped)

    def path(self, node: int) -> list[int]:
        """Return the tokens of the text up to a node of its tree."""
        found = []
        while node >= 0:
            found.append(self.nodes[node])
            node = self.parents[node]
        return [*self.tokens, *reversed(found)]


def world_config(
    dtype: str,
    prefix_cache: pkv.PrefixCacheConfig | None = None,
    *,
    enable_kv_transfer: bool = False,
    sliding_window: bool = False,
    is_wide: bool = False,
    **options,
) -> pkv.KVCacheConfig:
    """Layers of three rules and two of attention; `options` are of all recurrent ones.

    With `is_wide` heads are as large as those of models.
    """
    width = 128 if is_wide else 16
    recurrent = {
        1: pkv.LayerSpec(
            "recurrent",
            recurrent=pkv.RecurrentConfig("gated_delta", 4, 2, width, width + 8, **options),
            conv=pkv.ConvConfig(40, 4, "silu"),
        ),
        2: pkv.LayerSpec(
            "recurrent",
            recurrent=pkv.RecurrentConfig("kda", 2, 2, width // 2, width, **options),
            conv=pkv.ConvConfig(24, 3, None, has_bias=True),
        ),
        4: pkv.LayerSpec(
            "recurrent",
            recurrent=pkv.RecurrentConfig("mamba2", 4, 1, width // 2, width // 2, **options),
            conv=pkv.ConvConfig(40, 4, "silu", has_bias=True),
        ),
    }
    attention = {0: pkv.LayerSpec("mha"), 3: pkv.LayerSpec("mha_sliding", window=6)}
    return pkv.KVCacheConfig(
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
        layers=[(recurrent | attention)[i] for i in range(5)],
        rope=pkv.RopeConfig(mode="none"),
        prefix_cache=prefix_cache,
        enable_kv_transfer=enable_kv_transfer,
        sliding_window=sliding_window,
    )


class World:
    """A cache with random operations, and the texts that its sequences should have.

    Parameters
    ----------
    seed : int
    dtype : str
    prefix_cache : PrefixCacheConfig, optional
    create : callable, optional
        Makes the cache of a `KVCacheConfig`. None: `tvm_pagedkv.create`.
    options
        Those of `world_config`.
    """

    def __init__(
        self,
        seed: int,
        dtype: str,
        prefix_cache: pkv.PrefixCacheConfig | None = None,
        *,
        create: Callable[[pkv.KVCacheConfig], pkv.KVCache] | None = None,
        **options,
    ):
        self.rng = np.random.default_rng(seed)
        self.config = world_config(dtype, prefix_cache, **options)
        self.layers = {
            i: Layer(layer.recurrent, layer.conv, dtype, self.rng)
            for i, layer in enumerate(self.config.layers)
            if layer.recurrent is not None
        }
        self.cache = (create or pkv.create)(self.config)
        self.texts: dict[int, Text] = {}
        self.old: list[list[int]] = []
        self.tolerance = 3e-5 if dtype == "float32" else 2e-2
        if options.get("state_dtype", "float32") != "float32":  # rounded the other way, at times
            self.tolerance = 6e-2
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
            if self.config.sliding_window:
                names.append("slide")
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
        position = text.length
        if self.rng.integers(3):
            position = int(self.rng.integers(position + 1))
        self.cache.fork_sequence(seq_id, child, position)
        self.texts[child] = text.prefix(position)
        self.count("forks")

    def pop(self, seq_id: int) -> None:
        """Drop positions, or nodes of a tree."""
        text = self.texts[seq_id]
        size = text.length + len(text.nodes)
        count = int(self.rng.integers(min(size, 16) + 1 if self.rng.integers(2) else size + 1))
        tvm.get_global_func("pagedkv.check_pop")(self.cache, seq_id, count)
        self.cache.pop_n(seq_id, count)
        num_nodes = min(count, len(text.nodes))
        kept = len(text.nodes) - num_nodes
        del text.nodes[kept:], text.parents[kept:]
        shorter = text.prefix(text.length - (count - num_nodes))
        text.tokens, text.dropped = shorter.tokens, shorter.dropped
        text.sinks = text.sinks if text.window else shorter.sinks
        self.count("pops")

    def slide(self, seq_id: int) -> None:
        """Give a sequence a window."""
        text = self.texts[seq_id]
        if text.window or text.nodes:
            return
        text.sinks = text.sinks if text.dropped else int(self.rng.integers(6))
        text.window = text.sinks + int(self.rng.integers(1, 20))
        self.cache.enable_sliding_window(seq_id, text.window, text.sinks)
        text.slide()
        self.count("windows")

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
            and not any(self.texts[i].window or self.texts[i].dropped for i in lengths)
            else None
        )
        if self.run(lengths, rows, positions, None, recorded):
            for i in lengths:
                self.texts[i].tokens = wanted[i]
                self.texts[i].slide()

    def tree(self, seq_id: int) -> None:
        """Append nodes to the token tree of a sequence."""
        text = self.texts[seq_id]
        if len(text.nodes) > 12 or len(text.tokens) > 70 or text.window or text.dropped:
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


def outputs(world: World, lengths: dict[int, int], salt: int) -> list[np.ndarray]:
    """Append rows that depend on the salt alone, and return what all layers make of them."""
    rng = np.random.default_rng(salt)
    rows = [int(token) for token in rng.integers(NUM_TOKENS, size=sum(lengths.values()))]
    found = []
    with world.cache.forward(list(lengths), list(lengths.values())):
        for i in range(5):
            if i in world.layers:
                found += [x.numpy() for x in world.layers[i].run(world.cache, i, rows)]
            else:
                qkv = rng.standard_normal((len(rows), 4, 16)).astype(world.config.dtype)
                found.append(world.cache.attention(i, qkv).numpy())
    return found
