# SPDX-License-Identifier: Apache-2.0
"""Recurrent and convolution layers of a cache in NumPy, for tests of models.

`install` registers ``pagedkv.recurrent`` and ``pagedkv.conv`` over states that are kept beside a
real cache, which has the attention layers. They are computed token by token in float64, and kept
for every position, so that a sequence can be forked anywhere.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import tvm

from tvm_pagedkv import KVCache, KVCacheConfig, LayerSpec, RopeConfig
from tvm_pagedkv.models import caches, model

from ..reference.recurrent import recurrence

# A cache needs an attention layer; in models without one, layer 0 attends to zeros.
TINY = {"num_qo_heads": 1, "num_kv_heads": 1, "qk_head_dim": 8}


@dataclass
class Step:
    """A step of the cache that runs."""

    states: States
    seq_ids: list[int]
    lengths: list[int]

    def sequences(self):
        """Iterate over the ids of the step's sequences and their rows."""
        ends = np.cumsum(self.lengths)
        for seq_id, end, length in zip(self.seq_ids, ends, self.lengths, strict=True):
            yield seq_id, slice(end - length, end)


class States:
    """What the layers of a cache keep: (layer, sequence) -> rows or states, one per position."""

    def __init__(self, layers):
        self.layers = layers
        self.matrices: dict[tuple[int, int], np.ndarray] = {}
        self.rows: dict[tuple[int, int], np.ndarray] = {}

    def fork(self, parent: int, child: int, position: int) -> None:
        """Let a sequence begin with what another one has up to a position."""
        for kept, extra in ((self.matrices, 1), (self.rows, 0)):
            for layer, seq_id in [*kept]:
                if seq_id == parent:
                    kept[layer, child] = kept[layer, parent][: position + extra]

    def recurrent(self, step: Step, layer: int, scale: float, q, k, v, log_decay, beta):
        """Return the output of a recurrent layer."""
        spec = self.layers[layer].recurrent
        assert spec.has_beta == (beta is not None)
        assert q.shape[1:] == k.shape[1:] == (spec.num_key_heads, spec.key_dim)
        assert v.shape[1:] == (spec.num_heads, spec.value_dim)
        o = np.zeros(v.shape)
        for seq_id, rows in step.sequences():
            first = np.zeros((1, spec.num_heads, spec.key_dim, spec.value_dim))
            old = self.matrices.get((layer, seq_id), first)
            rate = None if beta is None else beta[rows]
            o[rows], new = recurrence(
                q[rows], k[rows], v[rows], log_decay[rows], rate, old[-1], scale
            )
            self.matrices[layer, seq_id] = np.concatenate([old, new[1:]])
        return o

    def conv(self, step: Step, layer: int, x, weight, bias):
        """Return the output of a convolution."""
        spec = self.layers[layer].conv
        assert x.shape[1] == spec.channels and weight.shape == (spec.channels, spec.width)
        assert spec.has_bias == (bias is not None)
        o = np.zeros(x.shape)
        for seq_id, rows in step.sequences():
            old = self.rows.get((layer, seq_id), np.zeros((0, spec.channels)))
            seen = np.concatenate([old, x[rows].astype("float64")])
            padded = np.concatenate([np.zeros((spec.width - 1, spec.channels)), seen])
            total = sum(
                padded[len(old) + i : len(seen) + i] * weight[:, i] for i in range(spec.width)
            )
            o[rows] = total if bias is None else total + bias
            self.rows[layer, seq_id] = seen
        return o / (1 + np.exp(-o)) if spec.activation == "silu" else o


def install(patch) -> None:
    """Register the functions, and let models make caches without the layers that have states.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
    """
    kept: dict[int, States] = {}
    running: list[Step] = []
    forward, fork_sequence = KVCache.forward, KVCache.fork_sequence

    def without_states(config, *arguments) -> KVCacheConfig:
        made = cache_config(config, *arguments)
        layers = [LayerSpec("linear") if x.recurrent or x.conv else x for x in made.layers]
        if not any(layer.kind != "linear" for layer in layers):
            layers[0] = LayerSpec(rope=RopeConfig("none"), **TINY)
        return replace(made, layers=layers)

    def create(self, *arguments, **options):
        cache = create_cache(self, *arguments, **options)
        kept[hash(cache)] = States(self.config.layers)
        return cache

    @contextlib.contextmanager
    def run(cache, seq_ids, lengths, *others):
        with forward(cache, seq_ids, lengths, *others):
            running.append(Step(kept[hash(cache)], list(seq_ids), list(lengths)))
            try:
                yield cache
            finally:
                running.pop()

    def fork(cache, parent, child, position=-1, *others):
        length = cache.sequence_length(parent) if position < 0 else position
        fork_sequence(cache, parent, child, position, *others)
        kept[hash(cache)].fork(parent, child, length)

    cache_config, create_cache = caches.cache_config, model.DecoderModel.create_cache
    patch.setattr(caches, "cache_config", without_states)
    patch.setattr(model, "cache_config", without_states)
    patch.setattr(model.DecoderModel, "create_cache", create)
    patch.setattr(KVCache, "forward", run)
    patch.setattr(KVCache, "fork_sequence", fork)

    def attend_to_zeros(cache, layer: int, num_rows: int) -> None:
        states = running[-1].states
        if layer == 0 and all(each.kind in ("recurrent", "conv") for each in states.layers):
            cache.attention(0, np.zeros((num_rows, 3, 8), dtype=cache.description["dtype"]))

    def recurrent(cache, layer, scale, q, k, v, log_decay, *others):
        *beta, o = others
        arrays = [x.numpy() for x in (q, k, v, log_decay, *beta)]
        beta = arrays[4] if beta else None
        step = running[-1]
        out = step.states.recurrent(step, layer, scale, *arrays[:4], beta)
        o.copyfrom(out.astype(o.numpy().dtype))
        attend_to_zeros(cache, layer, len(out))

    def conv(cache, layer, x, weight, *others):
        *bias, o = others
        step = running[-1]
        out = step.states.conv(
            step, layer, x.numpy(), weight.numpy(), bias[0].numpy() if bias else None
        )
        o.copyfrom(out.astype(o.numpy().dtype))

    tvm.register_global_func("pagedkv.recurrent", recurrent, override=True)
    tvm.register_global_func("pagedkv.conv", conv, override=True)
