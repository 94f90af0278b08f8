# SPDX-License-Identifier: Apache-2.0
"""Caches on a GPU beside the specification in NumPy: every kernel, and random calls."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tests import reference
from tests.python_kernels import poison, share_every_prefix, shuffle
from tests.reference_window import WindowedReferenceCache

MODES = ("none", "normal", "inline")
POPPABLE = 10  # positions: less than what layers with a window keep beyond it


class Kernels:
    """A bundle whose kernels are counted when they are called.

    Parameters
    ----------
    bundle : Bundle
    device : tvm.runtime.Device
    """

    def __init__(self, bundle: pkv.Bundle, device):
        self.bundle, self.device, self.calls = bundle, device, Counter()

    def create(self, mode: str | None = None, without: str = "", **capacities: int) -> pkv.KVCache:
        """A cache; `mode` is the one of its rotation, `without` a kernel that it is not given."""
        sets = [
            {name: self._counted(i, name, f) for name, f in each.items() if name != without}
            for i, each in enumerate(self.bundle.kernel_sets)
        ]
        described = dict(self.bundle.cache_map(**capacities))
        if mode is not None:
            described["rope_mode"] = MODES.index(mode)
        return tvm_ffi.get_global_func("pagedkv.create")(described, sets, self.device)

    def _counted(self, index: int, name: str, function) -> Callable:
        def call(*arguments):
            self.calls[index, name] += 1
            return function(*arguments)

        return call

    def never_called(self) -> list[tuple[int, str]]:
        """Index of the set and name of kernels that no cache has called."""
        return [
            (i, name)
            for i, each in enumerate(self.bundle.kernel_sets)
            for name in each
            if not self.calls[i, name]
        ]


class Pair:
    """A cache and its reference, driven alike.

    Parameters
    ----------
    cache : KVCache
    config : KVCacheConfig
    mode : str
        Of the rotation.
    seed : int
    """

    def __init__(self, cache: pkv.KVCache, config: pkv.KVCacheConfig, mode: str, seed: int):
        self.cache, self.config, self.rng = cache, config, np.random.default_rng(seed)
        self.dtype = config.dtype
        self.is_mla = [layer.kind == "mla" for layer in config.layers]
        mha = [layer for layer in config.layers if layer.kind != "mla"]
        rope = mha[0].rope
        rotary_dim = rope.rotary_dim or mha[0].qk_head_dim
        rotation = reference.Rope(rope.theta, rope.scale, rotary_dim, rope.scaling_dict)
        kind = WindowedReferenceCache if config.sliding_window else reference.ReferenceCache
        dtype = np.dtype(config.kv_dtype)
        self.mha = kind(
            len(mha), dtype, rotation, mode, [layer.window for layer in mha],
            config.logit_softcap, [layer.alibi or None for layer in mha],
        )  # fmt: skip
        self.references = [self.mha]
        if any(self.is_mla):
            self.latent = reference.ReferenceLatentCache(sum(self.is_mla), dtype)
            self.references.append(self.latent)
        self.windowed: set[int] = set()
        self.slack: dict[int, int] = {}  # positions that may have been dropped behind windows
        shuffle(cache, seed)

    @property
    def ids(self) -> list[int]:
        return list(self.mha.sequences)

    def local(self, layer: int) -> int:
        """A layer's index among those of its kind."""
        return sum(kind == self.is_mla[layer] for kind in self.is_mla[:layer])

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32).astype(self.dtype)

    def close(self, actual, expected, what: str) -> None:
        reference.assert_close(actual.numpy(), expected, self.dtype, what)

    # --- sequences ------------------------------------------------------------------------------

    def add(self, seq_id: int) -> None:
        self.cache.add_sequence(seq_id)
        for each in self.references:
            each.add_sequence(seq_id)
        self.slack[seq_id] = 0

    def remove(self, seq_id: int) -> None:
        self.cache.remove_sequence(seq_id)
        for each in self.references:
            each.remove_sequence(seq_id)
        self.windowed.discard(seq_id)

    def fork(self, parent: int, child: int, back: int) -> None:
        """A fork that lacks the last `back` positions."""
        position = self.mha.length(parent) - back
        self.cache.fork_sequence(parent, child, position)
        for each in self.references:
            each.fork_sequence(parent, child, position)
        self.slack[child] = self.slack[parent] + back

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        for each in self.references:
            each.pop_n(seq_id, n)
        self.slack[seq_id] += n

    def enable_window(self, seq_id: int, size: int, sinks: int) -> None:
        self.cache.enable_sliding_window(seq_id, size, sinks)
        self.mha.enable_window(seq_id, size, sinks)
        self.windowed.add(seq_id)

    # --- steps ----------------------------------------------------------------------------------

    def step(self, rows: dict[int, int | list[int]], in_parts: bool = False) -> None:
        """A step of plain rows (how many by sequence) or of tree nodes (their parents)."""
        ids = list(rows)
        trees = [value for value in rows.values() if isinstance(value, list)]
        lengths = [len(value) if isinstance(value, list) else value for value in rows.values()]
        parents = [parent for tree in trees for parent in tree] if trees else None
        with self.cache.forward(ids, lengths, parents):
            for each in self.references if trees else ():
                each.grow_trees(ids, lengths, parents)
            for layer, is_mla in enumerate(self.is_mla):
                what = f"layer {layer}, rows {rows}"
                attend = self._attend_mla if is_mla else self._attend
                if in_parts and not is_mla:
                    attend = self._attend_in_parts
                attend(layer, ids, lengths, bool(trees), what)
        if self.config.sliding_window:
            self.mha.end_step(ids)
        for seq_id, length in zip(ids, lengths, strict=True):
            self.slack[seq_id] = max(0, self.slack[seq_id] - length)
        self.cache.check_integrity()
        self._poison()

    def _poison(self) -> None:
        """NaN where nothing lies; on a GPU the host cannot."""
        if self.cache.description["device"] == tvm.cpu():
            poison(self.cache)

    def commit(self, leaves: dict[int, int]) -> None:
        self.cache.commit_tree(list(leaves), list(leaves.values()))
        for each in self.references:
            for seq_id, leaf in leaves.items():
                each.commit_tree(seq_id, leaf)
        self.cache.check_integrity()

    def _qkv(self, layer: int, num_rows: int) -> tuple[np.ndarray, int, float]:
        spec = self.config.layers[layer]
        heads = spec.num_qo_heads + 2 * spec.num_kv_heads
        qkv = self.normal(num_rows, heads, spec.qk_head_dim)
        return qkv, spec.num_kv_heads, spec.qk_head_dim**-0.5

    def _attend(self, layer: int, ids, lengths, has_trees: bool, what: str) -> None:
        qkv, num_kv_heads, scale = self._qkv(layer, sum(lengths))
        sinks = None
        if self.rng.random() < 0.3:
            sinks = self.rng.standard_normal(self.config.layers[layer].num_qo_heads, np.float32)
        out = self.cache.attention(layer, qkv, sinks=sinks)
        local = self.local(layer)
        o, _ = self.mha.attention(local, ids, lengths, qkv, num_kv_heads, scale, sinks)
        self.close(out, o, what)

    def _attend_in_parts(self, layer: int, ids, lengths, has_trees: bool, what: str) -> None:
        """As models do that rotate for themselves: to this step, to the past, merged."""
        qkv, num_kv_heads, scale = self._qkv(layer, sum(lengths))
        heads = self.config.layers[layer].num_qo_heads
        q, k, v = np.split(qkv, [heads, heads + num_kv_heads], axis=1)
        parts = self.cache.self_attention(layer, q, k, v)
        o, lse = self.cache.merge_attention(*parts, *self.cache.cross_attention(layer, q))
        local = self.local(layer)
        want = self.mha.attention(local, ids, lengths, qkv, num_kv_heads, scale)
        self.close(o, want[0], what)
        self.close(lse, want[1], f"lse of {what}")

    def _attend_mla(self, layer: int, ids, lengths, has_trees: bool, what: str) -> None:
        spec, num_rows = self.config.layers[layer], sum(lengths)
        latent = self.normal(num_rows, spec.qk_head_dim)
        self.cache.append_mla_kv(layer, latent)
        self.latent.append(self.local(layer), ids, lengths, latent)
        is_whole = (has_trees or num_rows == len(ids)) and self.rng.random() < 0.7
        if not is_whole:
            self._attend_before_absorption(layer, ids, lengths, what)
        q, scale = self.normal(num_rows, spec.num_qo_heads, spec.qk_head_dim), 0.1
        o, lse = self.cache.cross_attention(layer, q, scale)
        want = self.latent.absorbed(
            self.local(layer), ids, lengths, q, spec.v_head_dim, scale, with_step=is_whole
        )
        self.close(o, want[0], what)
        self.close(lse, want[1], f"lse of {what}")

    def _attend_before_absorption(self, layer: int, ids, lengths, what: str) -> None:
        spec, scale = self.config.layers[layer], 0.1
        shape = sum(lengths), spec.num_qo_heads
        q, k = (self.normal(*shape, spec.mla_original_qk_head_dim) for _ in range(2))
        v = self.normal(*shape, spec.mla_original_v_head_dim)
        state = self.cache.self_attention(layer, q, k, v, scale)
        want, start = [], 0
        for seq_id, n in zip(ids, lengths, strict=True):
            rows, tree = slice(start, start + n), self.latent.trees[seq_id]
            length = self.latent.length(seq_id)
            mask = reference.tree_mask(tree, n, length)[:, length - n :]
            want.append(reference.attention(q[rows], k[rows], v[rows], mask, scale))
            start += n
        o, lse = (np.concatenate(parts) for parts in zip(*want, strict=True))
        self.close(state[0], o, f"before absorption, {what}")
        self.close(state[1], lse, f"lse before absorption, {what}")
        other = self.normal(*o.shape), self.rng.standard_normal(lse.shape, np.float32)
        held = [x.numpy().astype(np.float64) for x in state]
        merged = self.cache.merge_attention(*state, *other)
        self.close(merged[0], reference.merge(*held, *other)[0], f"merge, {what}")

    # --- what the pages hold --------------------------------------------------------------------

    def check_rows(self) -> None:
        """K and V of all sequences without a window of their own."""
        groups = range(len(self.cache.stats()["groups"]))
        for seq_id in set(self.ids) - self.windowed:
            length = self.mha.length(seq_id)
            assert self.cache.sequence_length(seq_id) == length
            begin = max(self.cache.first_position(seq_id, group) for group in groups)
            held = [("K", self.cache.debug_get_kv(seq_id, begin), self.mha)]
            if any(self.is_mla):
                held.append(("rows", [self.cache.debug_get_kv_mla(seq_id, begin)], self.latent))
            for what, tensors, expected in held:
                for layer, rows in enumerate(expected.sequences[seq_id]):
                    for tensor, want in zip(tensors, rows or (), strict=rows is not None):
                        where = f"{what} of sequence {seq_id}, layer {layer}"
                        got = tensor.numpy()[layer]
                        reference.assert_close(got, want[begin:], self.dtype, where)


# --- what is run --------------------------------------------------------------------------------


def check_forwards(kernels: Kernels, size: int, seed: int = 0) -> str:
    """A prefill, decode, forks, pops, trees and their commits, windows; `size` is of a prompt."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.layers[0].rope.mode, seed)
    for seq_id in range(3):
        pair.add(seq_id)
    pair.step({0: size, 1: size // 2 + 1})
    pair.step({0: 1, 1: 1})
    pair.step({2: 5, 0: 1, 1: size // 3})
    pair.fork(0, 3, 3)
    pair.fork(3, 4, 0)
    pair.step({3: 1, 0: 1, 4: 1})
    pair.pop(1, 5)
    for _ in range(2):  # the second time with what the first has left
        pair.step({0: [-1, 0, 0, 1, 2], 3: [-1, -1, 0], 1: [-1]})
        pair.commit({0: 4, 3: 1, 1: -1})
    pair.step({0: [-1, 0, 0, 1], 4: [-1, 0, 0]})
    pair.step({4: [1], 0: [2, 3]})
    pair.commit({0: 5, 4: 2})
    pair.check_rows()
    if config.sliding_window:
        pair.enable_window(1, size // 4 + 3, 2)
        pair.enable_window(2, 4, 1)
        for rows in ({1: 1, 2: 1, 0: 1}, {2: 7, 1: size // 2, 0: 3}, {1: 1, 2: 1}):
            pair.step(rows)
    check_saved(kernels, pair)
    return f"{len(pair.ids)} sequences, {pair.cache.total_length()} positions"


def check_saved(kernels: Kernels, pair: Pair) -> None:
    """What is saved and loaded has the same bits."""
    ids = sorted(set(pair.ids) - pair.windowed)
    other = kernels.create()
    with tempfile.TemporaryDirectory() as folder:
        pair.cache.save(Path(folder) / "kv.safetensors", ids)
        other.load(Path(folder) / "kv.safetensors")
    for seq_id in ids:
        groups = range(len(other.stats()["groups"]))
        begin = max(pair.cache.first_position(seq_id, group) for group in groups)
        for cache_rows in zip(
            pair.cache.debug_get_kv(seq_id, begin), other.debug_get_kv(seq_id, begin), strict=True
        ):
            reference.assert_same_bits(*(rows.numpy() for rows in cache_rows), what="a checkpoint")


def check_parts(kernels: Kernels, size: int, seed: int = 1) -> str:
    """Self and cross attention, merged; and the halves of what a step does in one pass."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(mode="none"), config, "none", seed)
    pair.add(0)
    pair.add(1)
    for rows in ({0: size, 1: 3}, {0: 1, 1: size // 2}, {1: 1, 0: 1}):
        pair.step(rows, in_parts=True)
    pair.step({0: [-1, 0, 0], 1: [-1, 0, 1, 0]}, in_parts=True)
    pair.commit({0: 1, 1: 3})
    pair.check_rows()
    for mode in ("normal", "none"):
        if config.sliding_window and mode == "normal":
            continue
        halves = Pair(kernels.create(mode, without="rope_append"), config, mode, seed)
        halves.add(0)
        halves.step({0: size // 2})
        halves.step({0: 1})
        halves.check_rows()
    return f"{pair.cache.total_length()} positions"


def check_shared_prefix(kernels: Kernels, size: int, seed: int = 2) -> str:
    """Sequences over one prefix, which is read once where there are kernels for that."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.layers[0].rope.mode, seed)
    share_every_prefix(pair.cache)
    pair.add(0)
    pair.step({0: size})
    for child in range(1, 6):
        pair.fork(0 if child < 4 else 2, child, 0)
        pair.step({child: child})
    for rows in (dict.fromkeys(range(6), 1), {i: 1 + i for i in range(6)}, {1: 1, 2: 1}):
        pair.step(rows)
    stats = pair.cache.stats()
    return f"{stats['pages_read']} pages read of {stats['pages_read_without_sharing']}"


def check_random(kernels: Kernels, size: int, seconds: float, least: int, seed: int = 3) -> str:
    """Random calls, for some seconds but at least so many."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.layers[0].rope.mode, seed)
    rng, counts, end, next_id = pair.rng, Counter(), time.perf_counter() + seconds, 0
    room = config.max_total_tokens // 2
    while time.perf_counter() < end or counts.total() < least:
        ids = pair.ids
        plain = [i for i in ids if i not in pair.windowed and pair.slack[i] == 0]
        plain = [i for i in plain if pair.mha.length(i) > POPPABLE]
        choices = ["step", "step", "decode"] if ids else []
        choices += ["add"] if len(ids) < config.max_num_sequences else []
        choices += ["remove"] if len(ids) > 3 else []
        choices += ["pop", "tree"] if plain else []
        choices += ["fork"] if plain and "add" in choices else []
        choices += ["window"] if plain and config.sliding_window else []
        if pair.cache.total_length() > room:
            choices = ["remove"]
        what = choices[rng.integers(len(choices))]
        some = ids[rng.integers(len(ids))] if ids else None
        one = plain[rng.integers(len(plain))] if plain else None
        if what == "add":
            pair.add(next_id)
        elif what == "fork":
            pair.fork(one, next_id, int(rng.integers(POPPABLE)))
        elif what == "remove":
            pair.remove(some)
        elif what == "pop":
            pair.pop(one, int(rng.integers(1, POPPABLE)))
        elif what == "window":
            pair.enable_window(one, int(rng.integers(6, size)), int(rng.integers(5)))
        elif what == "tree":
            num_nodes = int(rng.integers(1, 12))
            pair.step({one: [int(rng.integers(-1, i)) for i in range(num_nodes)]})
            pair.commit({one: int(rng.integers(-1, num_nodes))})
        else:
            batch = rng.permutation(ids)[: rng.integers(1, len(ids) + 1)].tolist()
            most = max(2, size // len(batch))
            pair.step({i: 1 if what == "decode" else int(rng.integers(1, most)) for i in batch})
        next_id += what in ("add", "fork")
        counts[what] += 1
        if counts.total() % 10 == 0:
            pair.check_rows()
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))


def check_the_rest(kernels: Kernels) -> str:
    """Kernels that caches have not called: those that can be are called here.

    Raises
    ------
    AssertionError
        For a wrong result, and when one was called nowhere.
    """
    config, rng = kernels.bundle.config, np.random.default_rng(4)
    page, left = config.page_size, kernels.never_called()
    sets = [layer["kernel_set"] for layer in kernels.bundle.cache_map()["layers"]]

    def tensor(array):
        return tvm.runtime.tensor(array, device=kernels.device)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(config.dtype)

    slots = rng.permutation(7 * page)[:9].astype(np.int32)
    unknown = []
    for index, name in left:
        layer, function = config.layers[sets.index(index)], kernels.bundle.kernel_sets[index][name]
        heads = layer.num_kv_heads, layer.qk_head_dim
        if name == "merge":
            width = layer.mla_original_v_head_dim or layer.v_head_dim
            states = [normal(9, layer.num_qo_heads, width) for _ in range(2)]
            lses = [rng.standard_normal(states[0].shape[:2], np.float32) for _ in range(2)]
            expected = reference.merge(states[0], lses[0], states[1], lses[1])
            first = tensor(states[0]), tensor(lses[0])
            function(*first, tensor(states[1]), tensor(lses[1]))
            reference.assert_close(first[0].numpy(), expected[0], config.dtype, "merge")
            reference.assert_close(first[1].numpy(), expected[1], config.dtype, "lse of merge")
        elif name == "debug_get_kv":
            pages = normal(7, 2, heads[0], page, heads[1])
            out = [tensor(np.zeros((2, 9, *heads), config.dtype)) for _ in range(2)]
            function(tensor(pages), tensor(slots), *out, 1)
            for got, want in zip(out, reference.gather_slots(pages, slots), strict=True):
                reference.assert_same_bits(got.numpy()[1], want, name)
        elif name == "debug_get_kv_mla":
            pages, out = normal(7, page, heads[1]), np.zeros((2, 9, heads[1]), config.dtype)
            out = tensor(out)
            function(tensor(pages), tensor(slots), out, 1)
            reference.assert_same_bits(out.numpy()[1], pages.reshape(-1, heads[1])[slots], name)
        else:
            unknown.append(f"{name} of set {index}")
    assert not unknown, f"called by nothing: {', '.join(unknown)}"
    called = sum(map(len, kernels.bundle.kernel_sets))
    return f"{called} kernels, {len(left)} of them called by no cache"


def load(folder: Path, device) -> Kernels:
    """A bundle's kernels for a device."""
    return Kernels(pkv.load_bundle(folder, device=device), device)


def with_sharing(kernels: Kernels) -> bool:
    """Whether the bundle has kernels that read shared prefixes once."""
    return any("shared" in name for each in kernels.bundle.kernel_sets for name in each)
