# SPDX-License-Identifier: Apache-2.0
"""Both runtimes with both sets of kernels: all four mixes give what the reference gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .. import reference
from ..support.emulators.stock import create_positional, stock_cuda_kernels, stock_kernels
from ..support.harness.selections import latin_square

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "qk_head_dim": 64}
NUM_LAYERS = 2
SM_SCALE = 64**-0.5


def _config(dtype: str, mode: str) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=NUM_LAYERS,
        **HEADS,
        dtype=dtype,
        max_num_sequences=4,
        max_total_tokens=1024,
        prefill_chunk_size=128,
        rope=pkv.RopeConfig(mode=mode),
    )


def _kernels(whose: str, config: pkv.KVCacheConfig) -> tuple[dict, str]:
    if whose == "stock":
        kernels = stock_kernels(
            config.num_qo_heads,
            config.num_kv_heads,
            config.qk_head_dim,
            config.dtype,
            num_layers=NUM_LAYERS,
        )
        return kernels, "tirx"
    return dict(pkv.build(config).kernels), "tirx"


# Sequences that each step appends to, with how many rows; forks, pops and removals in between.
STEPS = (
    ("append", {0: 5, 1: 33}),
    ("append", {0: 1, 1: 1}),
    ("fork", (1, 2, -1)),
    ("append", {2: 1, 1: 1, 0: 1}),
    ("fork", (1, 3, 20)),
    ("append", {3: 17, 0: 16}),
    ("pop", (2, 7)),
    ("append", {2: 3, 3: 1}),
    ("remove", 1),
    ("append", {3: 1, 2: 1, 0: 1}),
)


@latin_square(3, "runtime_of", "kernels_of", "dtype", "mode")
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernels_of", ["stock", "pagedkv"])
@pytest.mark.parametrize("runtime_of", ["stock", "pagedkv"])
def test_mixes_agree_with_the_reference(runtime_of, kernels_of, dtype, mode):
    config = _config(dtype, mode)
    kernels, tag = _kernels(kernels_of, config)
    if runtime_of == "stock":
        pkv.use_stock_runtime()
    try:
        cache = create_positional(config, kernels, tag)
    finally:
        pkv.use_pagedkv_runtime()
    assert isinstance(cache, pkv.KVCache) == (runtime_of == "pagedkv")
    _run_scenario(cache, config)


def test_kernels_without_a_tag_under_the_positional_constructor():
    config = _config("float32", "normal")
    _run_scenario(create_positional(config, dict(pkv.build(config).kernels), None), config)


def test_a_cache_with_a_logit_softcap():
    config = dataclasses.replace(_config("float32", "normal"), logit_softcap=1.5)
    _run_scenario(pkv.create(config), config)


def test_our_tree_kernels_under_the_stock_runtime():
    """The first round of a tree runs `tree` and the past, a later one `tree_paged`."""
    config = _config("float32", "none")
    pkv.use_stock_runtime()
    try:
        cache = create_positional(config, dict(pkv.build(config).kernels), "tirx")
    finally:
        pkv.use_pagedkv_runtime()
    begin, end, add = (
        tvm.get_global_func(f"vm.builtin.kv_state_{name}")
        for name in ("begin_forward", "end_forward", "add_sequence")
    )
    attention = tvm.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
    rng = np.random.default_rng(0)
    held = [np.zeros((0, 12, 64), np.float32)] * 2
    for seq_id in range(2):
        add(cache, seq_id)
    nodes: list[list[int]] = [[], []]
    rounds = [
        ((5, 33), None),
        ((6, 3), [[-1, 0, 0, 1, -1, 3], [-1, 0, 1]]),
        ((1, 1), [[2], [2]]),
        ((4, 2), [[6, 6, 3, -1], [3, 1]]),
    ]
    for lengths, parents in rounds:
        qkv = rng.standard_normal((sum(lengths), 12, 64)).astype(np.float32)
        tree = None if parents is None else Shape([p for part in parents for p in part])
        begin(cache, Shape([0, 1]), Shape(lengths), tree)
        out = tvm.runtime.empty((sum(lengths), 8, 64), "float32")
        attention(cache, 0, SM_SCALE, tvm.runtime.tensor(qkv), out)
        end(cache)
        expected = []
        for b, rows in enumerate(np.split(qkv, [lengths[0]])):
            held[b] = np.concatenate([held[b], rows])
            nodes[b] += parents[b] if parents else []
            mask = reference.tree_mask(nodes[b], len(rows), len(held[b]))
            q, k, v = rows[:, :8], held[b][:, 8:10], held[b][:, 10:]
            expected.append(reference.attention(q, k, v, mask, SM_SCALE)[0])
        reference.assert_close(out.numpy(), np.concatenate(expected), "float32", str(lengths))


@pytest.mark.gpu
def test_stock_cuda_kernels_under_our_runtime():
    device = tvm.cuda()
    config = _config("float16", "normal")
    target = tvm.target.Target(
        {"kind": "cuda", "arch": f"sm_{device.compute_version.replace('.', '')}"}
    )
    kernels = stock_cuda_kernels(
        config.num_qo_heads, config.num_kv_heads, config.qk_head_dim, config.dtype, target
    )
    _run_scenario(create_positional(config, kernels, "tirx", device), config, device)


def _run_scenario(cache, config: pkv.KVCacheConfig, device=None) -> None:
    device = device or tvm.cpu()
    state = {
        name: tvm.get_global_func(f"vm.builtin.kv_state_{name}")
        for name in (
            "add_sequence",
            "remove_sequence",
            "fork_sequence",
            "popn",
            "begin_forward",
            "end_forward",
        )
    }
    attention = tvm.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
    length = tvm.get_global_func("vm.builtin.attention_kv_cache_get_sequence_length")
    rope = reference.Rope(theta=config.rope.theta, rotary_dim=config.qk_head_dim)
    expected = reference.ReferenceCache(
        NUM_LAYERS,
        np.dtype(config.dtype),
        rope,
        mode=config.rope.mode,
        softcap=config.logit_softcap,
    )
    rng = np.random.default_rng(0)
    for seq_id in (0, 1):
        state["add_sequence"](cache, seq_id)
        expected.add_sequence(seq_id)
    for step, (action, what) in enumerate(STEPS):
        if action == "fork":
            state["fork_sequence"](cache, *what)
            expected.fork_sequence(*what)
        elif action == "pop":
            state["popn"](cache, *what)
            expected.pop_n(*what)
        elif action == "remove":
            state["remove_sequence"](cache, what)
            expected.remove_sequence(what)
        else:
            state["begin_forward"](cache, Shape(list(what)), Shape(list(what.values())))
            for layer in range(NUM_LAYERS):
                num_rows = sum(what.values())
                heads = config.num_qo_heads + 2 * config.num_kv_heads
                qkv = rng.standard_normal((num_rows, heads, config.qk_head_dim))
                qkv = qkv.astype(config.dtype)
                out = tvm.runtime.empty(
                    (num_rows, config.num_qo_heads, config.qk_head_dim), config.dtype, device
                )
                attention(cache, layer, SM_SCALE, tvm.runtime.tensor(qkv, device=device), out)
                o, _ = expected.attention(
                    layer, list(what), list(what.values()), qkv, config.num_kv_heads, SM_SCALE
                )
                reference.assert_close(out.numpy(), o, config.dtype, f"step {step} layer {layer}")
            state["end_forward"](cache)
        for seq_id in expected.sequences:
            assert length(cache, seq_id) == expected.length(seq_id)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
