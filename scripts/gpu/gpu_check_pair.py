# SPDX-License-Identifier: Apache-2.0
"""A cache on a GPU and the specification in NumPy, driven alike; and which kernels were called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tests import reference
from tests.reference.window import WindowedReferenceCache
from tests.support.emulators.python_kernels import poison, shuffle
from tir_kernels.codec import CODECS

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
        """A cache; `mode` is that of all rotations, `without` a kernel that it is not given."""
        sets = [
            {name: self._counted(i, name, f) for name, f in each.items() if name != without}
            for i, each in enumerate(self.bundle.kernel_sets)
        ]
        described = dict(self.bundle.cache_map(**capacities))
        if mode is not None:
            own = {"rope_mode": MODES.index(mode)}
            described["layers"] = [
                {**layer, **own} if "rope_mode" in layer else layer for layer in described["layers"]
            ]
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
        self.cache, self.config, self.rng = cache, config.resolved(), np.random.default_rng(seed)
        self.dtype = config.dtype
        self.is_mla = [layer.kind == "mla" for layer in self.config.layers]
        mha = [layer for layer in self.config.layers if layer.kind != "mla"]
        rope = mha[0].rope
        rotary_dim = rope.rotary_dim or mha[0].qk_head_dim
        rotation = reference.Rope(rope.theta, rope.scale, rotary_dim, rope.scaling_dict)
        kind = WindowedReferenceCache if config.sliding_window else reference.ReferenceCache
        self.codec = CODECS.get(self.config.kv_dtype)
        dtype = self.codec or np.dtype(self.config.kv_dtype)
        self.mha = kind(
            len(mha), dtype, rotation, mode, [layer.window for layer in mha],
            config.logit_softcap, [layer.alibi for layer in mha],
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

    @property
    def tolerance(self) -> dict:
        """Return how `reference.assert_close` compares.

        Products with numbers of a codec round K or Q. Sums of a Hadamard matrix are in another
        order than those of the reference, so a code may be the neighbour of the expected one.
        """
        if self.codec is None:
            return {}
        return {"rounds_qk": True, "times": 20.0 if self.codec.has_hadamard else 1.0}

    def close(self, actual, expected, what: str) -> None:
        reference.assert_close(actual.numpy(), expected, self.dtype, what, **self.tolerance)

    def lse_close(self, actual, expected, what: str) -> None:
        what = f"lse of {what}"
        reference.assert_lse_close(actual.numpy(), expected, self.dtype, what, **self.tolerance)

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
        out = self.cache.attention(layer, qkv, sink_logits=sinks)
        local = self.local(layer)
        o, _ = self.mha.attention(local, ids, lengths, qkv, num_kv_heads, scale, sinks)
        self.close(out, o, what)

    def _attend_in_parts(self, layer: int, ids, lengths, has_trees: bool, what: str) -> None:
        """Attend to this step and to the past and merge, as models that rotate themselves do."""
        qkv, num_kv_heads, scale = self._qkv(layer, sum(lengths))
        heads = self.config.layers[layer].num_qo_heads
        q, k, v = np.split(qkv, [heads, heads + num_kv_heads], axis=1)
        parts = self.cache.self_attention(layer, q, k, v)
        o, lse = self.cache.merge_attention(*parts, *self.cache.cross_attention(layer, q))
        local = self.local(layer)
        want = self.mha.attention(local, ids, lengths, qkv, num_kv_heads, scale)
        if self.codec:
            want = self._attend_to_own_rows(local, ids, lengths, (q, k, v), scale)
        self.close(o, want[0], what)
        self.lse_close(lse, want[1], what)

    def _attend_to_own_rows(self, local: int, ids, lengths, qkv, scale: float) -> tuple:
        """Attention to the step's own rows before they are quantized, and to the past after it."""
        states, start = [], 0
        for seq_id, n in zip(ids, lengths, strict=True):
            q, k, v = (x[start : start + n].astype(np.float32) for x in qkv)
            held = self.mha.sequences[seq_id][local]
            k, v = (np.concatenate([x[:-n], own]) for x, own in zip(held, (k, v), strict=True))
            mask = reference.tree_mask(self.mha.trees[seq_id], n, len(k))
            states.append(reference.attention(q, k, v, mask, scale))
            start += n
        return tuple(np.concatenate(parts) for parts in zip(*states, strict=True))

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
        self.lse_close(lse, want[1], what)

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
        self.lse_close(state[1], lse, f"before absorption, {what}")
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
                        reference.assert_close(
                            got, want[begin:], self.dtype, where, **self.tolerance
                        )
