# SPDX-License-Identifier: Apache-2.0
"""The nn class inside compiled Relax models, in place of the stock one."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as StockBase
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode, TIRPagedKVCache
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .. import reference
from ..support.harness.fast_compilation import MODEL_TARGET
from ..support.harness.selections import latin_square, with_slow
from ..support.worlds.permissive_steps import permissive_step

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 6, 2, 32, 2
SM_SCALE = HEAD_DIM**-0.5
CAPACITIES = {
    "max_batch_size": 4,
    "max_total_seq_len": 512,
    "prefill_chunk_size": 64,
    "page_size": 16,
    "support_sliding_window": 0,
}


class AttentionOnly(nn.Module):
    """A model that is nothing but its cache."""

    def __init__(self, cache_class, rope: dict, kinds: str | list[str] = "mha", **extra):
        self.cache_class, self.rope, self.kinds, self.extra = cache_class, rope, kinds, extra

    def create(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ):
        return self.cache_class(
            attn_kind=self.kinds,
            max_batch_size=max_batch_size,
            max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=support_sliding_window,
            layer_partition=relax.ShapeExpr([0, NUM_LAYERS]),
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_QO_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=self.rope.get("mode", RopeMode.NORMAL),
            rope_scale=1,
            rope_theta=10000,
            rope_scaling=self.rope.get("scaling", {}),
            rope_ext_factors=self.rope.get("factors", relax.prim_value(0)),
            rotary_dim=HEAD_DIM,
            enable_disaggregation=False,
            dtype="float32",
            **{"target": MODEL_TARGET, **self.extra},
        )

    def fused(self, qkv: nn.Tensor, cache: StockBase):
        out = cache.attention_with_fused_qkv(0, qkv, NUM_QO_HEADS, SM_SCALE)
        return cache.attention_with_fused_qkv(1, qkv, NUM_QO_HEADS, SM_SCALE), out

    def parts(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor, cache: StockBase):
        o_self, lse_self = cache.self_attention(0, q, k, v, SM_SCALE)
        o_cross, lse_cross = cache.cross_attention(0, q, HEAD_DIM, SM_SCALE)
        return cache.merge_attn_output_inplace(o_self, lse_self, o_cross, lse_cross)


def _rows(num_heads: int) -> spec.Tensor:
    return spec.Tensor([1, "n", num_heads, HEAD_DIM], "float32")


def export_model(cache_class, rope: dict | None = None, **extra) -> tvm.IRModule:
    model = AttentionOnly(cache_class, rope or {}, **extra)
    plain = {"param_mode": "none", "effect_mode": "none"}
    cache = spec.Object(object_type=StockBase)
    module, _ = model.export_tvm(
        {
            "create": {name: int for name in CAPACITIES} | {"$": plain},
            "fused": {"qkv": _rows(NUM_QO_HEADS + 2 * NUM_KV_HEADS), "cache": cache, "$": plain},
            "parts": {
                "q": _rows(NUM_QO_HEADS),
                "k": _rows(NUM_KV_HEADS),
                "v": _rows(NUM_KV_HEADS),
                "cache": cache,
                "$": plain,
            },
        }
    )[:2]
    return module


def _compile(cache_class, rope: dict | None = None, **extra) -> relax.VirtualMachine:
    module = export_model(cache_class, rope, **extra)
    return relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())


def _create(vm: relax.VirtualMachine, **changes):
    return vm["create"](*(Shape([n]) for n in (CAPACITIES | changes).values()))


def _qkv(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    shape = (num_rows, NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    return rng.standard_normal(shape).astype("float32")


STEPS = ([18, 5], [3, 1], [1, 1], [20, 40], [1, 1])
# Lengths and parents of steps with trees; the leaves that are accepted after the last of them.
TREE_STEPS = [([5, 3], [-1, 0, 0, -1, 2, -1, 0, 0]), ([1, 2], [4, 2, -1])]
LEAVES = [5, 3]


def check_fused(
    vm,
    cache,
    rope: reference.Rope | list[reference.Rope],
    mode: str | list[str],
    windows=None,
    steps=STEPS,
    num_tree_steps=0,
    **logits,
) -> None:
    expected = reference.ReferenceCache(NUM_LAYERS, np.float32, rope, mode, windows, **logits)
    state = {
        name: tvm.get_global_func(f"vm.builtin.kv_state_{name}")
        for name in ("add_sequence", "begin_forward", "end_forward")
    }
    name = "vm.builtin.attention_kv_cache_commit_accepted_token_tree_nodes"
    commit = tvm.get_global_func(name)
    rng = np.random.default_rng(0)
    for seq_id in (0, 1):
        state["add_sequence"](cache, seq_id)
        expected.add_sequence(seq_id)
    plain = [(lengths, None) for lengths in steps]
    tree_steps = TREE_STEPS[:num_tree_steps]
    for lengths, parents in [*plain, *tree_steps, ([1, 1], None)]:
        if parents is not None:
            expected.grow_trees([0, 1], lengths, parents)
        elif expected.trees[0]:
            leaves = [min(leaf, len(expected.trees[i]) - 1) for i, leaf in enumerate(LEAVES)]
            commit(cache, Shape([0, 1]), Shape(leaves))
            for seq_id, leaf in enumerate(leaves):
                expected.commit_tree(seq_id, leaf)
        qkv = _qkv(rng, sum(lengths))
        parents = None if parents is None else Shape(parents)
        state["begin_forward"](cache, Shape([0, 1]), Shape(lengths), parents)
        outputs = vm["fused"](tvm.runtime.tensor(qkv[None]), cache)
        state["end_forward"](cache)
        for layer in range(NUM_LAYERS):
            o, _ = expected.attention(layer, [0, 1], lengths, qkv, NUM_KV_HEADS, SM_SCALE)
            actual = outputs[1 - layer].numpy()[0]
            reference.assert_close(actual, o, "float32", f"lengths {lengths} layer {layer}")


@pytest.mark.parametrize(
    ("mode", "scaling"),
    [
        (RopeMode.NONE, {}),
        pytest.param(RopeMode.NORMAL, {}, marks=pytest.mark.slow),
        (RopeMode.INLINE, {}),
        pytest.param(
            RopeMode.NORMAL,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            marks=pytest.mark.slow,
        ),
        (
            RopeMode.NORMAL,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        ),
    ],
    ids=["none", "normal", "inline", "llama3", "yarn"],
)
def test_model_gives_what_the_reference_gives(mode, scaling):
    vm = _compile(pkv.PagedKVCache, {"mode": mode, "scaling": scaling})
    cache = _create(vm)
    assert isinstance(cache, pkv.KVCache)
    rope = reference.Rope(rotary_dim=HEAD_DIM, scaling=scaling)
    check_fused(vm, cache, rope, mode.name.lower(), num_tree_steps=2)
    cache.check_integrity()


def _create_with(runtime_of: str, vm: relax.VirtualMachine):
    if runtime_of == "stock":
        pkv.use_stock_runtime()
    try:
        cache = _create(vm)
    finally:
        pkv.use_pagedkv_runtime()
    assert isinstance(cache, pkv.KVCache) == (runtime_of == "pagedkv")
    return cache


# Windows of the stock runtime hold where no chunk is as long as they are: its rows see all of their
# chunk, and its CPU kernel gives NaN to those that see nothing of the past. It serves no model all
# of whose layers have windows, and forked sequences see more than the window.
SHORT_CHUNKS = ([18, 5], [3, 1], [1, 1], [18, 18], [2, 17], [1, 1], [1, 1], [16, 1])


@pytest.mark.parametrize("front_end", ["stock", "pagedkv for the stock runtime"])
def test_layers_with_a_window_and_runtimes_mix(front_end):
    own = {"runtime": "stock"} if front_end != "stock" else {}
    vm = _compile(
        pkv.PagedKVCache if own else TIRPagedKVCache,
        {"mode": RopeMode.INLINE},
        kinds=["mha_sliding", "mha"],
        layer_sliding_window_size=19,
        **own,
    )
    rope = reference.Rope(rotary_dim=HEAD_DIM)
    for runtime_of, steps in (("stock", SHORT_CHUNKS), ("pagedkv", SHORT_CHUNKS + STEPS)):
        cache = _create_with(runtime_of, vm)
        check_fused(vm, cache, rope, "inline", [19, None], steps=steps)


def test_model_with_a_logit_softcap():
    vm = _compile(pkv.PagedKVCache, logit_softcap=0.5)
    check_fused(vm, _create(vm), reference.Rope(rotary_dim=HEAD_DIM), "normal", softcap=0.5)


@latin_square(2, "runtime_of", "front_end")
@pytest.mark.parametrize("runtime_of", ["stock", "pagedkv"])
@pytest.mark.parametrize("front_end", ["stock", "pagedkv for the stock runtime"])
def test_front_ends_and_runtimes_mix(front_end, runtime_of):
    if front_end == "stock":
        vm = _compile(TIRPagedKVCache)
    else:
        vm = _compile(pkv.PagedKVCache, runtime="stock")
    cache = _create_with(runtime_of, vm)
    # For CPUs the stock front end has the two kernels of trees in each other's place, and the stock
    # runtime commits no node of an earlier step than the last one.
    num_tree_steps = 0 if front_end == "stock" else 1 if runtime_of == "stock" else 2
    rope = reference.Rope(rotary_dim=HEAD_DIM)
    check_fused(vm, cache, rope, "normal", num_tree_steps=num_tree_steps)


def test_parts_merge_to_the_whole():
    """The fine-grained calls over a past of 21 tokens and a step of 4 rows."""
    vm = _compile(pkv.PagedKVCache, {"mode": RopeMode.NONE})
    cache = _create(vm)
    rng = np.random.default_rng(1)
    past, step = _qkv(rng, 21), _qkv(rng, 4)
    cache.add_sequence(7)
    with cache.forward([7], [21]):
        vm["fused"](tvm.runtime.tensor(past[None]), cache)
    q, k, v = np.split(step, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
    with permissive_step(cache, [7], [4]):
        o, lse = vm["parts"](*(tvm.runtime.tensor(x[None].copy()) for x in (q, k, v)), cache)
    expected = reference.ReferenceCache(1, np.float32)
    expected.add_sequence(7)
    expected.attention(0, [7], [21], past, NUM_KV_HEADS, SM_SCALE)
    expected_o, expected_lse = expected.attention(0, [7], [4], step, NUM_KV_HEADS, SM_SCALE)
    reference.assert_close(o.numpy()[0], expected_o, "float32", "o")
    reference.assert_lse_close(lse.numpy()[0], expected_lse, "float32", "lse")


@pytest.mark.parametrize("page_size", with_slow([1, 64], 64))
def test_other_page_sizes(page_size):
    vm = _compile(pkv.PagedKVCache, kernel_page_size=page_size)
    cache = _create(vm, page_size=page_size)
    check_fused(vm, cache, reference.Rope(rotary_dim=HEAD_DIM), "normal")


MLA_DIMS = {"mla_original_qk_head_dim": 16, "mla_original_v_head_dim": 16}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attn_kind": "mla"}, ValueError),  # no dims before absorption
        ({"attn_kind": ["mha", "mla"], "runtime": "stock", **MLA_DIMS}, ValueError),
        ({"attn_kind": ["mha"]}, ValueError),
        ({"attn_kind": "other"}, ValueError),
        ({"attn_kind": "mha_sliding", "layer_sliding_window_size": 0}, ValueError),
        ({"attn_kind": "linear"}, ValueError),
        ({"num_key_value_heads": 4}, ValueError),
        ({"qk_head_dim": 30, "v_head_dim": 30}, ValueError),
        ({"rotary_dim": 64}, ValueError),
        ({"rope_scaling": {"rope_type": "linear"}}, ValueError),
        ({"dtype": "float64"}, ValueError),
        ({"runtime": "other"}, ValueError),
        ({"rope_mode": [RopeMode.NONE]}, ValueError),  # for two layers
        ({"rope_mode": [RopeMode.NONE, RopeMode.NORMAL], "runtime": "stock"}, ValueError),
        ({"layer_ropes": [pkv.RopeConfig()]}, ValueError),  # for two layers
        ({"layer_ropes": [pkv.RopeConfig(), {"theta": 1e4}]}, TypeError),
        (
            {
                "layer_ropes": [pkv.RopeConfig(theta=theta) for theta in (1e4, 1e6)],
                "runtime": "stock",
            },
            ValueError,
        ),
        ({"attn_kind": "mha_chunked", "runtime": "stock"}, ValueError),
        ({"attn_kind": "mha_chunked", "layer_sliding_window_size": 0}, ValueError),
        ({"sliding_window_includes_self": True}, ValueError),  # without windows
        ({"sliding_window_includes_self": 1, "support_sliding_window": 1}, TypeError),
        (
            {
                "sliding_window_includes_self": True,
                "support_sliding_window": 1,
                "runtime": "stock",
            },
            ValueError,
        ),
        ({"target": tvm.target.Target({"kind": "cuda", "arch": "sm_75"})}, ValueError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_no_kernel_serves(change, error):
    arguments = {
        "attn_kind": "mha",
        "max_batch_size": 1,
        "max_total_seq_len": 64,
        "prefill_chunk_size": 64,
        "page_size": 16,
        "support_sliding_window": 0,
        "layer_partition": relax.ShapeExpr([0, 2]),
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "mla_original_qk_head_dim": 0,
        "mla_original_v_head_dim": 0,
        "rope_mode": RopeMode.NORMAL,
        "rope_scale": 1,
        "rope_theta": 10000,
        "rope_scaling": {},
        "rope_ext_factors": relax.prim_value(0),
        "rotary_dim": 32,
        "enable_disaggregation": False,
        "dtype": "float32",
        "target": tvm.target.Target("llvm"),
    }
    with pytest.raises(error):
        pkv.PagedKVCache(**(arguments | change))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
