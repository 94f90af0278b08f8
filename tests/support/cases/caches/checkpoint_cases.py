# SPDX-License-Identifier: Apache-2.0
"""Caches of every kind of layer, fed with rows that a reference keeps; checkpoints by hand."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

from .... import reference
from ....reference.checkpoint import page_group
from ...emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    poison,
    shuffle,
)

CACHE = "vm.builtin.attention_kv_cache_"


def _sliding(window: int) -> dict:
    return {**LAYER, "kind": "mha_sliding", "window": window}


WIDE = {**LAYER, "num_qo_heads": 6, "num_kv_heads": 3, "qk_head_dim": 16}
LAYERS = {
    "mha": [LAYER, LAYER],
    "sliding": [_sliding(6), _sliding(6)],
    "mixed": [LAYER, _sliding(5), WIDE, _sliding(9), LAYER],
    "mla": [MLA_LAYER, MLA_LAYER],
    "mla windows": [{**MLA_LAYER, "window": 6}, MLA_LAYER],
    "all": [_sliding(7), MLA_LAYER, LAYER],
}
POPPABLE = 16


def call(name: str, *args):
    """A global function of the cache."""
    return tvm_ffi.get_global_func(CACHE + name)(*args)


class Fed:
    """A cache and the rows that it has been given.

    Parameters
    ----------
    kind : key of LAYERS
    seed : int
        Of the free pages' order; not of the rows, which depend on sequence and position alone.
    emulated : EmulatedDevice, optional
        Where the cache is; None: on the CPU.
    """

    def __init__(self, kind: str, seed: int = 0, emulated=None, **fields):
        self.kind, self.layers = kind, LAYERS[kind]
        fields = {"max_total_tokens": 256, "page_size": 4} | fields
        self.dtype = np.dtype(fields.get("kv_dtype", "float32"))
        self.page_size = fields["page_size"]
        kernels = {**KERNELS, **MLA_KERNELS}
        if emulated is not None:
            kernels, fields["device"] = emulated.kernels(kernels), emulated.device
        self.cache = make_cache(kernels, layers=self.layers, **fields)
        self.rows: dict[int, list[tuple[np.ndarray, ...]]] = {}
        poison(self.cache)
        shuffle(self.cache, seed)

    def add(self, seq_id: int) -> None:
        self.cache.add_sequence(seq_id)
        self.rows[seq_id] = [
            (np.zeros((0, x["qk_head_dim"]), self.dtype),)
            if x["kind"] == "mla"
            else (np.zeros((0, x["num_kv_heads"], x["qk_head_dim"]), self.dtype),) * 2
            for x in self.layers
        ]

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        end = len(self.rows[parent][0][0]) if position == -1 else position
        self.rows[child] = [tuple(x[:end] for x in planes) for planes in self.rows[parent]]

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        end = len(self.rows[seq_id][0][0]) - n
        self.rows[seq_id] = [tuple(x[:end] for x in planes) for planes in self.rows[seq_id]]

    def step(self, lengths: dict[int, int], salt: int = 0) -> list[np.ndarray]:
        """Append rows to sequences, in all layers; returns the outputs."""
        outputs = []
        with self.cache.forward(list(lengths), list(lengths.values())):
            for index, layer in enumerate(self.layers):
                parts = []
                for seq_id, n in lengths.items():
                    start = len(self.rows[seq_id][index][0])
                    rng = np.random.default_rng([abs(seq_id), start, index, salt])
                    parts.append(self._draw(rng, layer, n))
                    self._keep(seq_id, index, parts[-1])
                outputs.append(self._attend(index, np.concatenate(parts)))
        return outputs

    @staticmethod
    def _draw(rng, layer: dict, n: int) -> np.ndarray:
        if layer["kind"] == "mla":
            heads = layer["num_qo_heads"] + 1
        else:
            heads = layer["num_qo_heads"] + 2 * layer["num_kv_heads"]
        return rng.standard_normal((n, heads, layer["qk_head_dim"])).astype("float32")

    def _keep(self, seq_id: int, index: int, qkv: np.ndarray) -> None:
        layer, held = self.layers[index], self.rows[seq_id][index]
        hq = layer["num_qo_heads"]
        if layer["kind"] == "mla":
            new = (qkv[:, hq],)
        else:
            new = np.split(qkv[:, hq:], 2, axis=1)
        self.rows[seq_id][index] = tuple(
            np.concatenate([old, rows.astype(self.dtype)])
            for old, rows in zip(held, new, strict=True)
        )

    def _attend(self, index: int, qkv: np.ndarray) -> np.ndarray:
        if self.layers[index]["kind"] != "mla":
            return self.cache.attention(index, qkv).numpy()
        hq = self.layers[index]["num_qo_heads"]
        self.cache.append_mla_kv(index, np.ascontiguousarray(qkv[:, hq]))
        q = np.ascontiguousarray(qkv[:, :hq])
        k = np.ascontiguousarray(q[:, :, :16])
        self.cache.self_attention(index, k, k, k[:, :, :8])
        return self.cache.cross_attention(index, q, 0.25)[0].numpy()

    def expected_group(self, seq_id: int, layer: int) -> np.ndarray:
        """The page group that a checkpoint of the sequence must have."""
        group = self.cache.description["layers"][layer]["group"]
        first = self.cache.first_position(seq_id, group) // self.page_size
        return page_group(self.rows[seq_id][layer], first, self.page_size)

    def check(self, seq_id: int) -> None:
        """Compare what the cache holds of a sequence with the rows."""
        self.cache.check_integrity()
        for layer, actual in enumerate(export(self.cache, seq_id)[1]):
            expected = self.expected_group(seq_id, layer)
            assert actual.numpy().tobytes() == expected.tobytes(), f"layer {layer}"
            reference.assert_close(actual.numpy(), expected, str(self.dtype), f"layer {layer}")


def fed_in_chunks(kind: str, chunks, seed: int = 0, **fields) -> Fed:
    """Sequence 3 in chunks, between others."""
    source = Fed(kind, seed, **fields)
    source.add(3)
    source.add(-8)
    for n in chunks:
        source.step({-8: 1, 3: n} if n % 2 else {3: n})
    return source


def forked(kind: str = "all", seed: int = 0, **fields) -> Fed:
    """Sequences 3, 4 and 5 with a common past, which have popped and slid; 6 is empty."""
    source = Fed(kind, seed, **fields)
    source.add(3)
    source.add(-1)
    source.add(6)
    for n in (20, 7):
        source.step({-1: 1, 3: n})
    source.fork(3, 4)
    source.step({3: 3, 4: 6}, salt=1)
    source.pop(3, 5)
    source.fork(4, 5, 31)
    source.step({5: 2}, salt=2)
    return source


def empty_groups(metadata: str) -> list[tvm.runtime.Tensor]:
    """Tensors for the page groups, of other content."""
    groups = []
    for group in json.loads(metadata)["groups"]:
        dtype = {"bfloat16": ml_dtypes.bfloat16}.get(group["dtype"], group["dtype"])
        groups.append(tvm.runtime.tensor(np.full(group["shape"], 7, dtype)))
    return groups


def export(cache, seq_id: int) -> tuple[str, list[tvm.runtime.Tensor]]:
    """A checkpoint: metadata and page groups."""
    metadata = call("get_checkpoint_metadata", cache, seq_id)
    groups = empty_groups(metadata)
    for group_id, out in enumerate(groups):
        call("export_page_group", cache, seq_id, group_id, out)
    return metadata, groups


def restore(cache, seq_id: int, checkpoint, order=None) -> None:
    """Import a checkpoint."""
    metadata, groups = checkpoint
    call("prepare_import", cache, seq_id, metadata)
    for group_id in order if order is not None else range(len(groups)):
        call("import_page_group", cache, seq_id, group_id, groups[group_id])
    call("finish_import", cache, seq_id)
