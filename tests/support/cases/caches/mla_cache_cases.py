# SPDX-License-Identifier: Apache-2.0
"""A cache of MLA layers and its reference, driven alike through every way of a step."""

from __future__ import annotations

import numpy as np
import tvm

import tvm_pagedkv as pkv
from tir_kernels import kernel_names

from .... import reference
from ...emulators.python_kernels import MLA_KERNELS, MLA_LAYER, make_cache, poison
from ..kernels.attention_cases import compiled
from ..kernels.mla_cases import make_spec
from .cache_cases import CachePair

NUM_LAYERS, HEADS, CKV, KPE, NOPE, V_DIM = 2, 4, 16, 8, 8, 8
QK_DIM = NOPE + KPE  # before absorption
SM_SCALE = QK_DIM**-0.5


def make_mla_cache(kernels: dict | None = None, **fields) -> pkv.KVCache:
    fields.setdefault("layers", [MLA_LAYER] * NUM_LAYERS)
    return make_cache([{**MLA_KERNELS, **(kernels or {})}], **fields)


def compiled_kernels(dtype: str, page_size: int = 4, **fields) -> dict:
    original = QK_DIM, V_DIM
    spec = make_spec(HEADS, (CKV, KPE), (dtype, dtype), page_size, original, **fields)
    return {name: compiled(name, spec) for name in kernel_names(spec)}


class MLAPair(CachePair):
    """A cache and its reference, driven alike by a model with weights of its own."""

    def __init__(self, cache: pkv.KVCache, seed: int = 0, sinks: np.ndarray | None = None):
        self.sinks = sinks
        dtype = np.dtype(cache.description["kv_dtype"])
        windows = [layer["window"] for layer in cache.description["layers"]]
        expected = reference.ReferenceLatentCache(NUM_LAYERS, dtype, windows=windows[:NUM_LAYERS])
        super().__init__(cache, expected, seed)
        self.w_k = self.rng.standard_normal((HEADS, NOPE, CKV)) / 4
        self.w_v = self.rng.standard_normal((HEADS, V_DIM, CKV)) / 4

    def cross(self, layer: int, q: np.ndarray, sinks: np.ndarray | None = None):
        """Absorbed cross attention, its output back in the space before absorption."""
        q = reference.mla_absorb(q, self.w_k).astype(self.dtype)
        o, lse = self.cache.cross_attention(layer, q, sink_logits=sinks)
        o = np.einsum("thc,hdc->thd", np.asarray(o.numpy(), np.float64), self.w_v)
        return tvm.runtime.tensor(o.astype(self.dtype), self.cache.description["device"]), lse

    def self_attention(self, layer: int, q: np.ndarray, latent: np.ndarray, sinks=None):
        k, v = reference.mla_expand(latent, self.w_k, self.w_v)
        k, v = k.astype(self.dtype), v.astype(self.dtype)
        return self.cache.self_attention(layer, q, k, v, sink_logits=sinks)

    def step(self, seq_ids: list[int], lengths: list[int], way: str) -> None:
        """`way`: "decode" (cross alone), "prefill" (self alone) or "extend" (both)."""
        with self.cache.forward(seq_ids, lengths):
            for layer in range(NUM_LAYERS):
                latent = self.normal(sum(lengths), CKV + KPE)
                q = self.normal(sum(lengths), HEADS, QK_DIM)
                assert self.cache.append_mla_kv(layer, latent).same_as(self.cache)
                if way == "decode":
                    result = self.cross(layer, q, self.sinks)
                else:
                    result = self.self_attention(layer, q, latent, self.sinks)
                if way == "extend":
                    result = self.cache.merge_attention(*result, *self.cross(layer, q))
                self.expected.append(layer, seq_ids, lengths, latent)
                o, lse = self.expected.non_absorbed(
                    layer, seq_ids, lengths, q, self.w_k, self.w_v, SM_SCALE
                )
                if self.sinks is not None:
                    o, lse = reference.apply_sinks(o, lse, self.sinks)
                what = f"{way} {seq_ids} {lengths} layer {layer}"
                found = [x.numpy() for x in result]
                how = {"what": what, "rounds_qk": True}  # of the absorbed Q and of the expanded K
                reference.assert_state_close(found, (o, lse), self.dtype, **how)
        self.cache.check_integrity()
        poison(self.cache)

    def check_rows(self) -> None:
        for seq_id in self.expected.sequences:
            groups = range(len(self.cache.stats()["groups"]))
            first = max(self.cache.first_position(seq_id, group) for group in groups)
            rows = self.cache.debug_get_kv_mla(seq_id, first).numpy()
            for layer in range(NUM_LAYERS):
                if self.expected.sequences[seq_id][layer] is not None:
                    wanted = self.expected.latent(seq_id, layer)[first:]
                    np.testing.assert_array_equal(rows[layer], wanted)
