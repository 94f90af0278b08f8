# SPDX-License-Identifier: Apache-2.0
"""Caches with quantized layers over NumPy kernels, and the rows that they must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .... import reference
from ...emulators.python_kernels import copy_pages, make_config, poison
from ...emulators.python_tree_kernels import KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES
from ...emulators.quantized_kernels import QuantizedLayer

LAYER = {"kind": "mha", "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32}
SLIDING_LAYER = {**LAYER, "kind": "mha_sliding", "window": 6}
MLA_LAYER = {
    "kind": "mla",
    "num_qo_heads": 4,
    "qk_head_dim": 64,
    "v_head_dim": 32,
    "mla_original_qk_head_dim": 16,
    "mla_original_v_head_dim": 8,
}
CODEC_NAMES = ("int8", "float8_e4m3fn", "int5", "int4")
PAIR_NAMES = ("int8,int4", "int5,int4", "int4,float8_e4m3fn")  # of layers with K and V
PAGE_SIZE = 4


def quantized_layers(
    layers: Sequence[dict], kv_dtypes: Sequence[str], page_size: int = PAGE_SIZE
) -> list[QuantizedLayer | None]:
    """The quantized pages of each layer; None for layers whose `kv_dtype` is no codec."""
    return [
        None if "float" in name and "float8" not in name else QuantizedLayer(name, layer, page_size)
        for layer, name in zip(layers, kv_dtypes, strict=True)
    ]


def kernel_sets(
    layers: Sequence[dict], quantized: Sequence[QuantizedLayer | None], more: dict | None = None
) -> list[dict]:
    """The kernels of each layer; `more` replaces some, None leaves one out."""
    sets = []
    for layer, pages in zip(layers, quantized, strict=True):
        plain = MLA_KERNELS_WITH_TREES if layer["kind"] == "mla" else KERNELS_WITH_TREES
        plain = {**plain, "copy_pages": copy_pages}
        sets.append({**(pages.kernels(plain) if pages else plain), **(more or {})})
    return sets


def make_quantized(
    layers: Sequence[dict],
    kv_dtypes: Sequence[str] | str,
    *,
    page_size: int = PAGE_SIZE,
    kernels: dict | None = None,
    **fields: Any,
):
    """A cache whose layers have a `kv_dtype` each."""
    names = [kv_dtypes] * len(layers) if isinstance(kv_dtypes, str) else kv_dtypes
    quantized = quantized_layers(layers, names, page_size)
    described = [
        {**layer, **(pages.fields if pages else {"kv_dtype": name}), "kernel_set": i}
        for i, (layer, pages, name) in enumerate(zip(layers, quantized, names, strict=True))
    ]
    config = make_config(layers=described, page_size=page_size, **fields)
    create = tvm_ffi.get_global_func("pagedkv.create")
    return create(config, kernel_sets(layers, quantized, kernels), tvm.cpu())


class QuantizedPair:
    """A cache and, for each of its layers, a reference that keeps what the codec keeps."""

    def __init__(
        self,
        layers: Sequence[dict],
        kv_dtypes: Sequence[str] | str,
        *,
        seed: int = 0,
        mode: str = "none",
        **fields: Any,
    ):
        names = [kv_dtypes] * len(layers) if isinstance(kv_dtypes, str) else list(kv_dtypes)
        print("seed", seed)
        self.rng, self.layers = np.random.default_rng(seed), layers
        modes = {"none": 0, "normal": 1, "inline": 2}
        fields = {"max_total_tokens": 256, "rope_mode": modes[mode]} | fields
        self.cache = make_quantized(layers, names, **fields)
        self.expected = []
        for layer, pages, name in zip(layers, quantized_layers(layers, names), names, strict=True):
            kv_dtype = pages.codec if pages else np.dtype(name)
            if layer["kind"] == "mla":
                each = reference.ReferenceLatentCache(1, kv_dtype)
                each.v_width = layer["v_head_dim"]
            else:
                rope = reference.Rope(rotary_dim=layer["qk_head_dim"])
                windows = [layer.get("window")]
                each = reference.ReferenceCache(1, kv_dtype, rope, mode, windows)
            self.expected.append(each)
        poison(self.cache)

    def add(self, seq_id: int) -> None:
        self.cache.add_sequence(seq_id)
        for each in self.expected:
            each.add_sequence(seq_id)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        for each in self.expected:
            each.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        for each in self.expected:
            each.pop_n(seq_id, n)

    def step(self, seq_ids: list[int], lengths: list[int], parents: list[int] | None = None):
        """Append random rows in all layers, attend and compare."""
        for each in self.expected:
            if parents is not None:
                each.grow_trees(seq_ids, lengths, parents)
        with self.cache.forward(seq_ids, lengths, parents):
            for index in range(len(self.layers)):
                self._attend(index, seq_ids, lengths)
        self.cache.check_integrity()
        poison(self.cache)

    def commit(self, seq_ids: list[int], leaves: list[int]) -> None:
        self.cache.commit_tree(seq_ids, leaves)
        for each in self.expected:
            for seq_id, leaf in zip(seq_ids, leaves, strict=True):
                each.commit_tree(seq_id, leaf)

    def _attend(self, index: int, seq_ids: list[int], lengths: list[int]) -> None:
        layer, expected, num_rows = self.layers[index], self.expected[index], sum(lengths)
        heads, width = layer["num_qo_heads"], layer["qk_head_dim"]
        what = f"layer {index} of {seq_ids} {lengths}"
        if layer["kind"] == "mla":
            kv, q = self.normal(num_rows, width), self.normal(num_rows, heads, width)
            self.cache.append_mla_kv(index, kv)
            state = self.cache.cross_attention(index, q, 0.25)
            expected.append(0, seq_ids, lengths, kv)
            # Where sequences append several rows, it covers the past alone.
            whole = max(lengths) == 1 or any(expected.trees[i] for i in seq_ids)
            wanted = expected.absorbed(
                0, seq_ids, lengths, q, layer["v_head_dim"], 0.25, with_step=whole
            )
            actual = [x.numpy() for x in state]
            reference.assert_state_close(actual, wanted, "float32", what=what)
            return
        qkv = self.normal(num_rows, heads + 2 * layer["num_kv_heads"], width)
        out = self.cache.attention(index, qkv).numpy()
        arguments = 0, seq_ids, lengths, qkv, layer["num_kv_heads"], width**-0.5
        reference.assert_close(out, expected.attention(*arguments)[0], "float32", what)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def rows(self, index: int, seq_id: int) -> tuple[np.ndarray, ...]:
        """K and V, or latent rows, of a layer as its pages must hold them."""
        return self.expected[index].sequences[seq_id][0]

    def check_rows(self) -> None:
        """Compare debug_get_kv of all sequences."""
        for kind in {layer["kind"] == "mla" for layer in self.layers}:
            read = self.cache.debug_get_kv_mla if kind else self.cache.debug_get_kv
            own = [i for i, x in enumerate(self.layers) if (x["kind"] == "mla") == kind]
            groups = range(len(self.cache.stats()["groups"]))
            for seq_id in filter(self.expected[0].length, self.expected[0].sequences):
                begin = max(self.cache.first_position(seq_id, g) for g in groups)
                actual = read(seq_id, begin)
                for plane, tensor in enumerate(actual if isinstance(actual, tuple) else [actual]):
                    for n, index in enumerate(own):
                        wanted = self.rows(index, seq_id)[plane][begin:]
                        what = f"rows of {seq_id}, layer {index}"
                        reference.assert_close(tensor.numpy()[n], wanted, "float32", what)
