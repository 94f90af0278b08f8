# SPDX-License-Identifier: Apache-2.0
"""Learned sinks: the kernel, the runtime object and the nn front end against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend.nn import spec
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler.build import vector_target

from ... import reference
from ...relax.test_frontend import (
    CAPACITIES,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    SM_SCALE,
    AttentionOnly,
    _create,
    _qkv,
    _rows,
)
from ...support.cases.kernels.attention_cases import compiled, normal, tensor
from ...support.emulators.python_kernels import (
    LAYER,
    make_cache,
    poison,
    share_every_prefix,
    shuffle,
    snapshot,
)
from ...support.harness.fast_compilation import MODEL_TARGET
from ...support.worlds.permissive_steps import permissive_step

F32, F16, BF16 = "float32", "float16", "bfloat16"
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")


# --- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("heads, dim, num_rows", [((8, 2), 64, 5), ((71, 1), 24, 300)])
@parametrize_seed
def test_kernel(heads, dim, num_rows, dtype, seed):
    """Sinks far below, around and far above what a row has summed, and rows without anything."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, heads[0])
    o = normal(rng, (*shape, dim), dtype)
    lse = rng.uniform(-300, 300, shape).astype(F32)
    sinks = (lse[0] * math.log(2) + rng.uniform(-8, 8, heads[0])).astype(F32)
    sinks[1] = -np.inf
    lse[1], lse[2, ::2], o[1], o[2, ::2] = -np.inf, -np.inf, 0, 0
    expected = reference.apply_sinks(o, lse, sinks)
    actual = tensor(o), tensor(lse)
    kernel_spec = KernelSpec(*heads, dim, dim, dtype, dtype, target=vector_target("native"))
    compiled("apply_sinks", kernel_spec)(*actual, tensor(sinks))
    reference.assert_close(actual[0].numpy(), expected[0], dtype, "o")
    reference.assert_lse_close(actual[1].numpy(), expected[1], F32, "lse")


# --- the cache ----------------------------------------------------------------------------------

STEPS = (([0, 1], [5, 9]), ([1, 0], [3, 1]), ([0, 1], [1, 1]))


def _check(cache: pkv.KVCache, heads, dim: int, dtype: str, seed: int, **fields) -> None:
    """Whole steps with sinks, without them, and of a layer that shares K and V."""
    expected = reference.ReferenceCache(1, dtype, mode="none", **fields)
    rng = np.random.default_rng(seed)
    sinks = (2 * rng.standard_normal(heads[0])).astype(F32)
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
        expected.add_sequence(seq_id)
    shuffle(cache, seed)
    for seq_ids, lengths in STEPS:
        qkv = normal(rng, (sum(lengths), heads[0] + 2 * heads[1], dim), dtype)
        before = {s: expected.kv(s, 0) for s in seq_ids}
        outputs = []
        for given in (sinks, None):
            for seq_id, kv in before.items():
                expected.sequences[seq_id][0] = kv
            step = expected.attention(0, seq_ids, lengths, qkv, heads[1], dim**-0.5, given)
            outputs.append(step[0])
        assert np.abs(outputs[0] - outputs[1]).max() > 0.05  # they matter
        q, k, v = np.split(qkv, [heads[0], heads[0] + heads[1]], axis=1)
        with cache.forward(seq_ids, lengths):
            actual = cache.attention(0, qkv, sink_logits=sinks).numpy()
            reference.assert_close(actual, outputs[0], dtype, "attention")
            shared = cache.attention_with_shared_kv(0, q, k, v, sink_logits=sinks).numpy()
            reference.assert_close(shared, outputs[0], dtype, "attention_with_shared_kv")
            plain = cache.attention_with_shared_kv(0, q, k, v).numpy()
            reference.assert_close(plain, outputs[1], dtype, "without")
        poison(cache)


@parametrize_seed
def test_over_numpy_kernels(seed):
    _check(make_cache(num_layers=1), (4, 2), 8, F32, seed)


@pytest.mark.parametrize(
    "dtype, layer, softcap",
    [
        pytest.param(F32, pkv.LayerSpec(), None, marks=pytest.mark.slow),
        (BF16, pkv.LayerSpec("mha_sliding", 4, sink_logits=True), None),
        pytest.param(F16, pkv.LayerSpec(sink_logits=True), 2.0, marks=pytest.mark.slow),
    ],
    ids=["f32-pass", "bf16-window", "f16-softcap"],
)
@parametrize_seed
def test_over_compiled_kernels(dtype, layer, softcap, seed):
    config = pkv.KVCacheConfig(
        num_layers=1,
        num_qo_heads=6,
        num_kv_heads=2,
        qk_head_dim=40,
        dtype=dtype,
        page_size=4,
        max_total_tokens=64,
        prefill_chunk_size=32,
        rope=pkv.RopeConfig(mode="none"),
        layers=[layer],
        logit_softcap=softcap,
    )
    fields = {"windows": [layer.window], "softcap": softcap}
    _check(pkv.create(config), (6, 2), 40, dtype, seed, **fields)
    _check_parts(pkv.create(config), dtype, seed, **fields)


def _check_parts(cache: pkv.KVCache, dtype: str, seed: int, **fields) -> None:
    """Sinks in either part of a step, with shared pages and branching trees among the steps."""
    expected = reference.ReferenceCache(1, dtype, mode="none", **fields)
    rng = np.random.default_rng(seed)
    sinks = rng.standard_normal(6).astype(F32)
    share_every_prefix(cache)
    for each in (cache, expected):
        each.add_sequence(0)
    parents = [-1, 0, 0, 2]

    def step(seq_ids, lengths, parts, trees=()):
        qkv = normal(rng, (sum(lengths), 10, 40), dtype)
        if trees:
            expected.grow_trees(seq_ids, lengths, parents * len(seq_ids))
        want = expected.attention(0, seq_ids, lengths, qkv, 2, 40**-0.5, sinks)
        tree = {"token_tree_parents": parents * len(seq_ids)} if trees else {}
        with cache.forward(seq_ids, lengths, **tree):
            if not parts:
                found = cache.attention(0, qkv, sink_logits=sinks), None
            else:
                q, k, v = np.split(qkv, [6, 8], axis=1)
                own, past = (sinks if name in parts else None for name in ("own", "past"))
                found = cache.self_attention(0, q, k, v, sink_logits=own)
                other = cache.cross_attention(0, q, sink_logits=past)
                found = cache.merge_attention(*found, *other)
        reference.assert_close(found[0].numpy(), want[0], dtype, f"{parts}")

    step([0], [9], ("own",))
    for child in (1, 2, 3):
        cache.fork_sequence(0, child)
        expected.fork_sequence(0, child)
    step([0, 1, 2, 3], [1, 1, 1, 1], ())
    step([0, 1, 2, 3], [1, 3, 1, 2], ("past",))
    step([0, 2], [4, 4], (), trees=True)
    poison(cache)


@parametrize_seed
def test_the_parts_of_a_step_take_sinks_as_one_more_part(seed):
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    rng = np.random.default_rng(seed)
    sinks = rng.standard_normal(4).astype(F32)
    q, k, v = (normal(rng, (3, n, 8), F32) for n in (4, 2, 2))
    with cache.forward([0], [3]):
        o, lse = cache.self_attention(0, q, k, v)
        sink = np.broadcast_to(sinks * np.float32(np.log2(np.e)), (3, 4))
        o, lse = cache.merge_attention(o, lse, np.zeros((3, 4, 8), F32), sink)
    mask = reference.causal_mask(3, 3)
    expected = reference.attention(q, k, v, mask, 8**-0.5, sinks=sinks)
    reference.assert_close(o.numpy(), expected[0], F32, "o")
    reference.assert_lse_close(lse.numpy(), expected[1], F32, "lse")


@pytest.mark.parametrize(
    "sinks, message",
    [
        (np.zeros(3, F32), r"sink_logits must have shape \[4\], got \[3\]"),
        (np.zeros((1, 4), F32), r"sink_logits must have shape \[4\], got \[1, 4\]"),
        (np.zeros(4, F16), "sink_logits must be float32, got float16"),
    ],
)
def test_sinks_are_checked_before_anything_is_written(sinks, message):
    cache = make_cache(num_layers=1)
    cache.add_sequence(0)
    rows = np.ones((2, 8, 8), F32)
    with cache.forward([0], [2]):
        before = snapshot(cache, [0])
        with pytest.raises(ValueError, match=message):
            cache.attention(0, rows, sink_logits=sinks)
        assert snapshot(cache, [0]) == before
        cache.attention(0, rows)
        with pytest.raises(ValueError, match=message):
            cache.attention_with_shared_kv(
                0, rows[:, :4], rows[:, :2], rows[:, :2], sink_logits=sinks
            )


def test_global_functions_take_them_on_either_side_of_the_output():
    cache = make_cache(layers=[LAYER])
    cache.add_sequence(0)
    attention = tvm.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
    qkv = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(F32)
    qkv, sinks = tvm.runtime.tensor(qkv), tvm.runtime.tensor(np.zeros(4, F32))
    strided = tvm_ffi.from_dlpack(np.zeros(8, F32)[::2])
    others = ((), (strided,)), ((sinks,), ()), ((strided,), ())
    with cache.forward([0], [1]):
        outputs = []
        for before, after in (((), ()), ((), (None,)), ((None,), ()), ((), (sinks,)), *others):
            out = tvm.runtime.empty((1, 4, 8), F32)
            attention(cache, 0, 1.0, qkv, *before, out, *after)
            outputs.append(out.numpy())
        for more in (1.0, out):
            with pytest.raises((TypeError, ValueError), match="output o, of three|float"):
                attention(cache, 0, 1.0, qkv, out, more)
        with pytest.raises(ValueError, match=r"shapes \[4\] and \[4\]"):
            attention(cache, 0, 1.0, qkv, sinks, sinks)
    for with_none in outputs[1:3]:
        np.testing.assert_array_equal(outputs[0], with_none)
    for with_sinks in outputs[4:]:
        np.testing.assert_array_equal(outputs[3], with_sinks)
    assert (np.abs(outputs[3]) < np.abs(outputs[0])).all()


def test_global_functions_of_parts_take_them_on_either_side_of_the_outputs():
    cache = make_cache(layers=[LAYER])
    cache.add_sequence(0)
    rng = np.random.default_rng(0)
    q, k, v = (tvm.runtime.tensor(normal(rng, (3, n, 8), F32)) for n in (4, 2, 2))
    sinks = tvm.runtime.tensor(np.ones(4, F32))
    attend = tvm.get_global_func("vm.builtin.attention_kv_cache_self_attention")
    with cache.forward([0], [3]):
        results = []
        for before, after in (((), ()), ((sinks,), ()), ((), (sinks,))):
            o, lse = tvm.runtime.empty((3, 4, 8), F32), tvm.runtime.empty((3, 4), F32)
            attend(cache, 0, 1.0, q, k, v, *before, o, lse, *after)
            results.append((o.numpy(), lse.numpy()))
    for i in range(2):
        np.testing.assert_array_equal(results[1][i], results[2][i])
    assert (results[1][1] > results[0][1]).all()


def test_a_cache_without_the_kernel_names_it():
    cache = make_cache(kernels={"apply_sinks": None}, num_layers=1)
    cache.add_sequence(0)
    with permissive_step(cache, [0], [1]), pytest.raises(ValueError, match="'apply_sinks'"):
        cache.attention(0, np.zeros((1, 8, 8), F32), sink_logits=np.zeros(4, F32))


# --- the front end ------------------------------------------------------------------------------


class WithSinks(AttentionOnly):
    """The first layer attends with sinks, the second shares its K and V."""

    def attend(self, qkv, q, k, v, sinks, cache: pkv.PagedKVCacheObject):
        out = cache.attention_with_fused_qkv(0, qkv, NUM_QO_HEADS, SM_SCALE, sinks)
        shared = cache.attention_with_shared_kv(0, q, k, v, SM_SCALE, sinks)
        return out, shared, cache.attention_with_fused_qkv(1, qkv, NUM_QO_HEADS, SM_SCALE)


def _compile(sinks: spec.Tensor, **fields) -> relax.VirtualMachine:
    model = WithSinks(pkv.PagedKVCache, {"mode": 0}, **fields)
    plain = {"param_mode": "none", "effect_mode": "none"}
    heads = {"qkv": NUM_QO_HEADS + 2 * NUM_KV_HEADS, "q": NUM_QO_HEADS}
    rows = {name: _rows(n) for name, n in (heads | {"k": NUM_KV_HEADS, "v": NUM_KV_HEADS}).items()}
    cache = spec.Object(object_type=pkv.PagedKVCacheObject)
    module, _ = model.export_tvm(
        {
            "create": {name: int for name in CAPACITIES} | {"$": plain},
            "attend": {**rows, "sinks": sinks, "cache": cache, "$": plain},
        }
    )[:2]
    return relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())


@parametrize_seed
def test_front_end(seed):
    vm = _compile(spec.Tensor([NUM_QO_HEADS], F32), sink_logits=True)
    cache = _create(vm)
    assert all(layer["sink_logits"] for layer in cache.description["layers"])
    rng = np.random.default_rng(seed)
    sinks = rng.standard_normal(NUM_QO_HEADS).astype(F32)
    expected = reference.ReferenceCache(1, F32)
    cache.add_sequence(0)
    expected.add_sequence(0)
    begin = tvm.get_global_func("vm.builtin.kv_state_begin_forward")
    for n in (5, 1):
        qkv = _qkv(rng, n)
        q, k, v = np.split(qkv, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=-2)
        rows = (x[None] for x in (qkv, q, k, v))
        begin(cache, Shape([0]), Shape([n]))
        outputs = vm["attend"](*map(tvm.runtime.tensor, (*rows, sinks)), cache)
        cache.end_forward()
        before = expected.sequences[0][0]
        with_sinks = expected.attention(0, [0], [n], qkv, NUM_KV_HEADS, SM_SCALE, sinks)[0]
        expected.sequences[0][0] = before
        plain = expected.attention(0, [0], [n], qkv, NUM_KV_HEADS, SM_SCALE)[0]
        for out, wanted in zip(outputs, (with_sinks, with_sinks, plain), strict=True):
            reference.assert_close(out.numpy()[0], wanted, F32)


def test_front_end_refuses_other_sinks():
    with pytest.raises(ValueError, match=r"sink_logits must be float32 \[6\], got float16 \[6\]"):
        _compile(spec.Tensor([NUM_QO_HEADS], F16))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
