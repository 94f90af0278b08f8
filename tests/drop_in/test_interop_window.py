# SPDX-License-Identifier: Apache-2.0
"""Windows of sequences with both runtimes and both sets of kernels, as far as the stock ones go.

With either half of the stock cache all rows of a step see what the first one sees, so here no step
is longer than the window has room for.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from tvm_ffi import Shape

import tir_kernels
import tvm_pagedkv as pkv
from tvm_pagedkv.compiler.build import kernel_spec, load_kernels, resolve_target

from .. import reference
from ..reference.window import WindowedReferenceCache
from ..support.cases.caches.cache_cases import reserved_bytes
from ..support.emulators.stock import create_positional, stock_kernels
from ..support.harness.selections import latin_square

NUM_LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
STATE, CACHE = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_"


def _call(name: str, *args):
    return tvm.get_global_func(name)(*args)


def _config(mode: str, **fields) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=NUM_LAYERS, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, qk_head_dim=DIM,
        dtype="float32", max_num_sequences=4, max_total_tokens=512, prefill_chunk_size=128,
        rope=pkv.RopeConfig(mode=mode), sliding_window=True, **fields,
    )  # fmt: skip


@functools.cache
def _kernels(whose: str, mode: str) -> dict:
    if whose == "stock":
        return stock_kernels(HEADS, KV_HEADS, DIM, "float32", num_layers=NUM_LAYERS)
    config, target = _config(mode), resolve_target()
    resolved = config.resolved()
    spec = kernel_spec(resolved, resolved.layers[0], target)
    names = ("prefill_windowed", "decode_windowed")
    builders = {name: functools.partial(tir_kernels.build_kernel, name, spec) for name in names}
    windowed = load_kernels(builders, ("kernels for windows", repr(spec)), target)
    return {
        **pkv.build(config).kernels,
        "prefill_sliding": windowed["prefill_windowed"],
        "decode_sliding": windowed["decode_windowed"],
    }


class _Pair:
    """A cache behind the global functions, and its reference."""

    def __init__(self, cache, mode: str):
        is_stock = not isinstance(cache, pkv.KVCache)
        if is_stock and mode == "normal":
            mode = "inline"  # what it makes of it where sequences may have windows
        self.cache, self.rng = cache, np.random.default_rng(0)
        self.expected = WindowedReferenceCache(
            NUM_LAYERS, np.dtype("float32"), reference.Rope(rotary_dim=DIM), mode,
            includes_self=False if is_stock else None,
        )  # fmt: skip
        self.row = int(self.expected.includes_self)  # by this a window is larger than what is held

    def add(self, seq_id: int, window: int = 0, sinks: int = 0) -> None:
        _call(STATE + "add_sequence", self.cache, seq_id)
        self.expected.add_sequence(seq_id)
        if window:
            self.enable(seq_id, window, sinks)

    def enable(self, seq_id: int, window: int, sinks: int) -> None:
        _call(CACHE + "enable_sliding_window_for_seq", self.cache, seq_id, window, sinks)
        self.expected.enable_window(seq_id, window, sinks)

    def fork(self, parent: int, child: int, position: int) -> None:
        _call(STATE + "fork_sequence", self.cache, parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        _call(STATE + "popn", self.cache, seq_id, n)
        self.expected.pop_n(seq_id, n)

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        num_rows = sum(lengths)
        _call(STATE + "begin_forward", self.cache, Shape(seq_ids), Shape(lengths))
        for layer in range(NUM_LAYERS):
            qkv = self.rng.standard_normal((num_rows, HEADS + 2 * KV_HEADS, DIM)).astype("float32")
            out = tvm.runtime.empty((num_rows, HEADS, DIM), "float32")
            attend = CACHE + "attention_with_fused_qkv"
            _call(attend, self.cache, layer, DIM**-0.5, tvm.runtime.tensor(qkv), out)
            o, _ = self.expected.attention(layer, seq_ids, lengths, qkv, KV_HEADS, DIM**-0.5)
            reference.assert_close(out.numpy(), o, "float32", f"layer {layer} {seq_ids} {lengths}")
        _call(STATE + "end_forward", self.cache)
        self.expected.end_step(seq_ids)
        for seq_id in seq_ids:
            length = _call(CACHE + "get_sequence_length", self.cache, seq_id)
            assert length == self.expected.length(seq_id)


@latin_square(3, "runtime_of", "kernels_of", "mode")
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("kernels_of", ["stock", "pagedkv"])
@pytest.mark.parametrize("runtime_of", ["stock", "pagedkv"])
def test_mixes_agree_with_the_reference(runtime_of, kernels_of, mode):
    if runtime_of == "stock":
        pkv.use_stock_runtime()
    try:
        cache = create_positional(_config(mode), _kernels(kernels_of, mode), "tirx")
    finally:
        pkv.use_pagedkv_runtime()
    assert isinstance(cache, pkv.KVCache) == (runtime_of == "pagedkv")
    pair = _Pair(cache, mode)
    pair.add(0, 24 + pair.row, 5)
    pair.add(1)
    pair.step([0, 1], [22, 7])
    pair.step([1, 0], [30, 2])
    for _ in range(40):
        pair.step([0, 1], [1, 1])
    pair.fork(0, 2, 4)  # within the sinks
    pair.enable(2, 18 + pair.row, 3)
    pair.step([2, 0, 1], [13, 1, 1])
    for _ in range(20):
        pair.step([2, 0], [1, 1])
    pair.pop(0, 7)
    pair.step([1], [20])
    pair.step([0, 2, 1], [6, 1, 1])
    for _ in range(20):
        pair.step([1, 0, 2], [1, 1, 1])


def test_all_of_ours_under_the_positional_constructor():
    """Then a step may be of any length, and the plain kernels do it all."""
    kernels = dict(pkv.build(_config("inline")).kernels)
    pair = _Pair(create_positional(_config("inline"), kernels, None), "inline")
    pair.add(0, 24, 5)
    pair.add(1)
    for lengths in ([70, 20], [40, 1], [1, 1], [9, 30]):
        pair.step([0, 1], lengths)
    pair.fork(0, 2, -1)
    pair.step([2, 0, 1], [1, 40, 3])
    pair.step([1, 2, 0], [1, 1, 1])


@pytest.mark.parametrize(
    "dtype, mode",
    [
        ("float32", "inline"),
        pytest.param("bfloat16", "inline", marks=pytest.mark.slow),
        ("float32", "normal"),
    ],
)
def test_a_cache_by_configuration(dtype, mode):
    """`create`, with layers that have windows of their own in between."""
    layers = [pkv.LayerSpec(), pkv.LayerSpec("mha_sliding", 40), pkv.LayerSpec()]
    config = pkv.KVCacheConfig(
        3, HEADS, KV_HEADS, DIM, dtype=dtype, max_num_sequences=3, max_total_tokens=1024,
        prefill_chunk_size=100, rope=pkv.RopeConfig(mode=mode), sliding_window=True,
        layers=layers,
    )  # fmt: skip
    cache = pkv.create(config)
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    rope, numpy_dtype = reference.Rope(rotary_dim=DIM), np.dtype(dtype)
    expected = WindowedReferenceCache(3, numpy_dtype, rope, mode, [None, 40, None])
    rng = np.random.default_rng(1)
    for seq_id, window in ((0, (30, 4)), (1, None), (2, (64, 20))):
        cache.add_sequence(seq_id)
        expected.add_sequence(seq_id)
        if window:
            cache.enable_sliding_window(seq_id, *window)
            expected.enable_window(seq_id, *window)
    poison = tvm.get_global_func("pagedkv.poison_free_pages")
    for seq_ids, lengths in (
        ([0, 1, 2], [50, 9, 41]), ([2, 0], [60, 40]), ([0, 1, 2], [1, 1, 1]), ([2, 1], [1, 70]),
        ([1, 2, 0], [1, 1, 1]), ([0], [100]),
    ):  # fmt: skip
        with cache.forward(seq_ids, lengths):
            for layer in range(3):
                qkv = rng.standard_normal((sum(lengths), HEADS + 2 * KV_HEADS, DIM))
                qkv = qkv.astype("float32").astype(numpy_dtype)
                out = cache.attention(layer, qkv).numpy()
                o, _ = expected.attention(layer, seq_ids, lengths, qkv, KV_HEADS, DIM**-0.5)
                reference.assert_close(out, o, dtype, f"layer {layer} {seq_ids} {lengths}")
        expected.end_step(seq_ids)
        poison(cache)
        cache.check_integrity()
        assert reserved_bytes(cache) == config.memory_bytes()


def test_configurations_that_cannot_have_windows():
    with pytest.raises(ValueError, match="layer 1: sliding_window is not possible with MLA layers"):
        _config("none", layers=[pkv.LayerSpec(), pkv.LayerSpec("mla")])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
