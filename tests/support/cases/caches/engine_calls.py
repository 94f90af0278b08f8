# SPDX-License-Identifier: Apache-2.0
"""A cache driven as a serving engine drives it: global functions by name, and nothing else."""

from __future__ import annotations

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .... import reference
from ....reference.window import WindowedReferenceCache
from ...emulators.python_kernels import KERNELS
from ...emulators.stock import create_positional

NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, DIM = 2, 4, 2, 8
SM_SCALE = DIM**-0.5
STATE, CACHE = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_"


def call(name: str, *arguments):
    return tvm_ffi.get_global_func(name)(*arguments)


def engine_config(**fields) -> pkv.KVCacheConfig:
    """Pages of 4 slots, 64 of them, and steps of at most 4 sequences and 32 rows."""
    small = {
        "dtype": "float32", "page_size": 4, "max_num_sequences": 4, "max_total_tokens": 256,
        "prefill_chunk_size": 32, "rope": pkv.RopeConfig(mode="none"),
    }  # fmt: skip
    return pkv.KVCacheConfig(NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, DIM, **{**small, **fields})


def make_engine(whose: str, kernels: dict | None = None, **fields) -> Engine:
    """An engine over the cache inside apache-tvm ("stock") or over ours, with NumPy kernels."""
    nothing = dict.fromkeys(("compact_copy", "debug_get_kv"), lambda *_: None)
    kernels = {**nothing, **KERNELS, **(kernels or {})}
    kernels = {name: tvm_ffi.convert(kernel) for name, kernel in kernels.items()}
    if whose == "stock":
        pkv.use_stock_runtime()
    try:
        cache = create_positional(engine_config(**fields), kernels, "tirx")
    finally:
        pkv.use_pagedkv_runtime()
    assert isinstance(cache, pkv.KVCache) == (whose != "stock")
    mode = engine_config(**fields).rope.mode
    if whose == "stock" and fields.get("sliding_window") and mode == "normal":
        mode = "inline"  # what it makes of it
    expected = WindowedReferenceCache(
        NUM_LAYERS, np.dtype("float32"), reference.Rope(rotary_dim=DIM), mode,
        includes_self=False if whose == "stock" else None,
        slides_within_step=False,  # the kernels have the arguments of apache-tvm's
    )  # fmt: skip
    return Engine(cache, expected)


class Engine:
    """The calls of an engine, and what the reference cache says of each."""

    def __init__(self, cache, expected: WindowedReferenceCache):
        self.cache, self.expected, self.rng = cache, expected, np.random.default_rng(0)

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            call(STATE + "add_sequence", self.cache, seq_id)
            self.expected.add_sequence(seq_id)

    def enable_window(self, seq_id: int, window: int, sinks: int) -> None:
        call(CACHE + "enable_sliding_window_for_seq", self.cache, seq_id, window, sinks)
        self.expected.enable_window(seq_id, window, sinks)

    def remove(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            call(STATE + "remove_sequence", self.cache, seq_id)
            self.expected.remove_sequence(seq_id)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        call(STATE + "fork_sequence", self.cache, parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, count: int) -> None:
        call(STATE + "popn", self.cache, seq_id, count)
        self.expected.pop_n(seq_id, count)

    def clear(self) -> None:
        call(STATE + "clear", self.cache)
        for seq_id in list(self.expected.sequences):
            self.expected.remove_sequence(seq_id)

    def begin(self, seq_ids, lengths, parents=None) -> None:
        """Begin a step; without trees the call has two arguments, as engines make it."""
        tree = [] if parents is None else [Shape(parents)]
        call(STATE + "begin_forward", self.cache, Shape(seq_ids), Shape(lengths), *tree)

    def step(self, seq_ids, lengths, parents=None, rows=None) -> None:
        """One forward of all layers, compared with the reference; `rows` of each: qkv."""
        self.begin(seq_ids, lengths, parents)
        if parents is not None:
            self.expected.grow_trees(seq_ids, lengths, parents)
        num_rows = sum(lengths)
        shape = (num_rows, NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM)
        for layer in range(NUM_LAYERS):
            qkv = self.rng.standard_normal(shape).astype("float32") if rows is None else rows[layer]
            out = tvm.runtime.empty((num_rows, NUM_QO_HEADS, DIM), "float32")
            attend = CACHE + "attention_with_fused_qkv"
            call(attend, self.cache, layer, SM_SCALE, tvm.runtime.tensor(qkv), out)
            arguments = layer, seq_ids, lengths, qkv, NUM_KV_HEADS, SM_SCALE
            o, _ = self.expected.attention(*arguments)
            reference.assert_close(out.numpy(), o, "float32", f"layer {layer} {seq_ids} {lengths}")
        call(STATE + "end_forward", self.cache)
        self.expected.end_step(seq_ids)
        self.check()

    def commit(self, seq_ids, leaves) -> None:
        name = CACHE + "commit_accepted_token_tree_nodes"
        call(name, self.cache, Shape(seq_ids), Shape(leaves))
        for seq_id, leaf in zip(seq_ids, leaves, strict=True):
            self.expected.commit_tree(seq_id, leaf)
        self.check()

    @property
    def num_available_pages(self) -> int:
        return call(CACHE + "get_num_available_pages", self.cache)

    @property
    def total_length(self) -> int:
        return call(CACHE + "get_total_sequence_length", self.cache)

    def check(self) -> None:
        """Lengths, which count nodes that are not committed."""
        lengths = {i: self.expected.length(i) for i in self.expected.sequences}
        for seq_id, length in lengths.items():
            assert call(CACHE + "get_sequence_length", self.cache, seq_id) == length
        assert self.total_length == sum(lengths.values())
        if isinstance(self.cache, pkv.KVCache):
            self.cache.check_integrity()
