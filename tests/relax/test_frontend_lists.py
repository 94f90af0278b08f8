# SPDX-License-Identifier: Apache-2.0
"""Attention to lists of positions in a compiled Relax model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tir_kernels.codec import codec_of

from .. import reference
from ..reference.index import assert_chosen, assert_chosen_blocks, block_scores, index_scores
from ..reference.listed import attention_by_heads, expand_blocks
from ..reference.page_bounds import bound_scores, choose_pages, page_bounds
from ..reference.quantized import keep
from ..support.harness.fast_compilation import MODEL_TARGET

HEADS, KV_HEADS, DIM, WIDTH, SCALE = 4, 2, 16, 5, 0.25
BLOCKS, BLOCK = 2, 8  # of a list, positions of one


class Lists(nn.Module):
    """A layer that attends to the same lists twice."""

    def __init__(self, **changes):
        self.changes = changes

    def create(self):
        return pkv.PagedKVCache(
            **{
                "attn_kind": "mha",
                "max_batch_size": 2,
                "max_total_seq_len": 128,
                "prefill_chunk_size": 32,
                "page_size": 4,
                "support_sliding_window": 0,
                "layer_partition": relax.ShapeExpr([0, 1]),
                "num_hidden_layers": 1,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "qk_head_dim": DIM,
                "v_head_dim": DIM,
                "mla_original_qk_head_dim": 0,
                "mla_original_v_head_dim": 0,
                "rope_mode": RopeMode.NONE,
                "rope_scale": 1,
                "rope_theta": 10000,
                "rope_scaling": {},
                "rope_ext_factors": relax.prim_value(0),
                "rotary_dim": DIM,
                "enable_disaggregation": False,
                "dtype": "float32",
                "target": MODEL_TARGET,
                "lists": True,
                **self.changes,
            }
        )

    def attend(
        self, qkv: nn.Tensor, q: nn.Tensor, positions: nn.Tensor, cache: pkv.PagedKVCacheObject
    ):
        o = cache.attention_to_positions(0, qkv, positions, HEADS, SCALE)
        return (o, *cache.cross_attention_to_positions(0, q, positions, DIM, SCALE))

    def attend_to_blocks(
        self, qkv: nn.Tensor, q: nn.Tensor, blocks: nn.Tensor, cache: pkv.PagedKVCacheObject
    ):
        o = cache.attention_to_blocks(0, qkv, blocks, BLOCK, HEADS, SCALE)
        return (o, *cache.cross_attention_to_blocks(0, q, blocks, BLOCK, DIM, SCALE))


def export(**changes) -> tvm.IRModule:
    plain = {"param_mode": "none", "effect_mode": "none"}
    rows = {
        "qkv": spec.Tensor(["n", HEADS + 2 * KV_HEADS, DIM], "float32"),
        "q": spec.Tensor(["n", HEADS, DIM], "float32"),
        "positions": spec.Tensor(["n", WIDTH], "int32"),
        "cache": spec.Object(object_type=pkv.PagedKVCacheObject),
    }
    blocks = {name: value for name, value in rows.items() if name != "positions"}
    blocks["blocks"] = spec.Tensor(["n", KV_HEADS, BLOCKS], "int32")
    signatures = {
        "create": {"$": plain},
        "attend": {**rows, "$": plain},
        "attend_to_blocks": {**blocks, "$": plain},
    }
    return Lists(**changes).export_tvm(signatures)[0]


def test_model():
    rng = np.random.default_rng(0)
    vm = relax.VirtualMachine(tvm.compile(export(), target=MODEL_TARGET), tvm.cpu())
    cache = vm["create"]()
    expected = reference.ReferenceCache(1, np.dtype("float32"))
    for each in (cache, expected):
        each.add_sequence(0)
    for n, kind in ((11, "positions"), (1, "positions"), (12, "blocks"), (1, "blocks")):
        qkv = rng.standard_normal((n, HEADS + 2 * KV_HEADS, DIM)).astype("float32")
        begin = expected.length(0)
        owns = range(begin, begin + n)
        lists = np.array([rng.integers(-1, own + 1, WIDTH) for own in owns], np.int32)
        positions, name = lists[:, None], "attend"
        if kind == "blocks":
            choices = [[rng.permutation(own // BLOCK + 1) for _ in range(KV_HEADS)] for own in owns]
            lists = np.full((n, KV_HEADS, BLOCKS), -1, np.int32)
            for row, chosen in zip(lists, choices, strict=True):
                for one, blocks in zip(row, chosen, strict=True):
                    one[: len(blocks)] = blocks[:BLOCKS]
            positions, name = expand_blocks(lists, BLOCK, owns), "attend_to_blocks"
        q = np.ascontiguousarray(qkv[:, :HEADS])
        with cache.forward([0], [n]):
            got = vm[name](*(tvm.runtime.tensor(x) for x in (qkv, q, lists)), cache)
        expected.attention(0, [0], [n], qkv, KV_HEADS, SCALE)
        want = attention_by_heads(q, *expected.kv(0, 0), positions, owns, SCALE)
        reference.assert_close(got[0].numpy(), want[0], "float32", "attention")
        reference.assert_state_close([x.numpy() for x in got[1:]], want, "float32")


class Budgeted(Lists):
    """A layer whose decode steps attend within a budget."""

    def attend(self, qkv: nn.Tensor, sinks: nn.Tensor, cache: pkv.PagedKVCacheObject):
        return cache.attention_within_budget(0, qkv, 9, HEADS, SCALE, sinks)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_model_with_a_budget(has_sinks):
    """Two pages of 4 positions, in steps of one row; others attend to everything."""
    rng = np.random.default_rng(0)
    plain = {"param_mode": "none", "effect_mode": "none"}
    rows = {
        "qkv": spec.Tensor(["n", HEADS + 2 * KV_HEADS, DIM], "float32"),
        "sinks": spec.Tensor([HEADS], "float32"),
        "cache": spec.Object(object_type=pkv.PagedKVCacheObject),
    }
    changes = {"lists": False, "page_bounds": True, "sink_logits": has_sinks}
    model = Budgeted(**changes)
    module, _ = model.export_tvm({"create": {"$": plain}, "attend": {**rows, "$": plain}})
    vm = relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())
    cache, sinks = vm["create"](), rng.standard_normal(HEADS).astype("float32")
    cache.add_sequence(0)
    kept: list[np.ndarray] = []
    for n in (21, 1, 1):
        qkv = rng.standard_normal((n, HEADS + 2 * KV_HEADS, DIM)).astype("float32")
        with cache.forward([0], [n]):
            got = vm["attend"](*(tvm.runtime.tensor(x) for x in (qkv, sinks)), cache).numpy()
        kept.append(qkv)
        known = np.concatenate(kept)
        q, k, v = qkv[:, :HEADS], known[:, HEADS : HEADS + KV_HEADS], known[:, HEADS + KV_HEADS :]
        owns = range(len(known) - n, len(known))
        num_pages = 2 if n == 1 else len(known)
        chosen = [
            choose_pages(bound_scores(row, *page_bounds(k[: own + 1], 4)), num_pages)
            for row, own in zip(q, owns, strict=True)
        ]
        positions = expand_blocks(chosen, 4, owns)
        of_keys = attention_by_heads(q, k, v, positions, owns, SCALE)
        want, _ = reference.apply_sinks(*of_keys, sinks)
        reference.assert_close(got, want, "float32", "attention")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "stock"}, "page_bounds need runtime 'pagedkv'"),
        (
            {"attn_kind": "mla", "mla_original_qk_head_dim": 8, "mla_original_v_head_dim": 8},
            "page_bounds is for kind 'mha', not 'mla'",
        ),
        (
            {"target": tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")},
            "bounds of pages have kernels for CPUs only",
        ),
    ],
    ids=["stock", "mla", "cuda"],
)
def test_models_that_have_no_budget(changes, message):
    with pytest.raises(ValueError, match=message):
        export(lists=False, page_bounds=True, **changes)


LANE_HEADS, LANE_DIM, CHOSEN = 2, 8, 4


class Indexed(Lists):
    """Two layers that attend to what a lane chooses, one to positions and one to blocks."""

    def attend(
        self,
        qkv: nn.Tensor,
        keys: nn.Tensor,
        q: nn.Tensor,
        weights: nn.Tensor,
        cache: pkv.PagedKVCacheObject,
    ):
        cache = cache.append_index(1, keys)
        positions = cache.index_top_k(1, q, weights, CHOSEN, SCALE)
        o = cache.attention_to_positions(0, qkv, positions, HEADS, SCALE)
        blocks = cache.index_top_blocks(1, q, BLOCKS, BLOCK)
        return o, positions, cache.attention_to_blocks(2, qkv, blocks, BLOCK, HEADS, SCALE), blocks


LANE = pkv.LayerSpec("index", num_qo_heads=LANE_HEADS, qk_head_dim=LANE_DIM)
INDEXED = {
    "attn_kind": ["mha", "index", "mha"],
    "num_hidden_layers": 3,
    "layer_partition": relax.ShapeExpr([0, 3]),
}


def export_indexed(**changes) -> tvm.IRModule:
    plain = {"param_mode": "none", "effect_mode": "none"}
    tensors = {
        "qkv": spec.Tensor(["n", HEADS + 2 * KV_HEADS, DIM], "float32"),
        "keys": spec.Tensor(["n", LANE_DIM], "float32"),
        "q": spec.Tensor(["n", LANE_HEADS, LANE_DIM], "float32"),
        "weights": spec.Tensor(["n", LANE_HEADS], "float32"),
        "cache": spec.Object(object_type=pkv.PagedKVCacheObject),
    }
    signatures = {"create": {"$": plain}, "attend": {**tensors, "$": plain}}
    return Indexed(**{**INDEXED, **changes}).export_tvm(signatures)[0]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_model_with_an_index_lane(kv_dtype):
    rng = np.random.default_rng(0)
    module = export_indexed(index_lane=replace(LANE, kv_dtype=kv_dtype))
    cache = relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())
    cache, attend = cache["create"](), cache["attend"]
    assert [layer["kv_dtype"] for layer in cache.description["layers"]] == [
        *("float32", kv_dtype or "float32", "float32")
    ]
    expected = reference.ReferenceCache(1, np.dtype("float32"))
    lane = reference.ReferenceLatentCache(1, np.dtype("float32"))
    for each in (cache, expected, lane):
        each.add_sequence(0)
    for n in (21, 1):
        owns = range(expected.length(0), expected.length(0) + n)
        shapes = (HEADS + 2 * KV_HEADS, DIM), (LANE_DIM,), (LANE_HEADS, LANE_DIM), (LANE_HEADS,)
        inputs = [rng.standard_normal((n, *shape)).astype("float32") for shape in shapes]
        with cache.forward([0], [n]):
            got = [x.numpy() for x in attend(*map(tvm.runtime.tensor, inputs), cache)]
        qkv, keys, q, weights = inputs
        expected.attention(0, [0], [n], qkv, KV_HEADS, SCALE)
        lane.append(0, [0], [n], keys if kv_dtype is None else keep(codec_of(kv_dtype), keys))
        o, positions, o_of_blocks, blocks = got
        for row, own in enumerate(owns):
            known = lane.latent(0, 0)[: own + 1]
            assert_chosen(
                positions[row], index_scores(q[row], weights[row], known, SCALE), "float32"
            )
            scores = block_scores(q[row], known, BLOCK)
            assert_chosen_blocks(blocks[row], scores, (0, 1), "float32")
        rows = np.ascontiguousarray(qkv[:, :HEADS]), *expected.kv(0, 0)
        for found, lists in (
            (o, positions[:, None]),
            (o_of_blocks, expand_blocks(blocks, BLOCK, owns)),
        ):
            want, _ = attention_by_heads(*rows, lists, owns, SCALE)
            reference.assert_close(found, want, "float32", "attention")


@pytest.mark.parametrize("kinds", [["mha", "index", "mha"], ["mha", "linear", "index"]], ids=str)
def test_windows_that_the_model_leaves_open(kinds):
    """Models of mlc-llm say only when a cache is made whether its sequences may have windows."""

    class Open(Indexed):
        def create(self, support_sliding_window: tirx.Var):
            self.changes["support_sliding_window"] = support_sliding_window
            return super().create()

    plain = {"param_mode": "none", "effect_mode": "none"}
    model = Open(**{**INDEXED, "attn_kind": kinds}, index_lane=LANE)
    module, _ = model.export_tvm({"create": {"support_sliding_window": int, "$": plain}})[:2]
    create = relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())["create"]
    for has_windows, message in ((0, "without sliding_window"), (1, "MLA layers and index lanes")):
        cache = create(Shape([has_windows]))
        cache.add_sequence(0)
        with pytest.raises(ValueError, match=message):
            cache.enable_sliding_window(0, 8, 2)
    with pytest.raises(ValueError, match="layer 1: sliding_window .* MLA layers and index lanes"):
        pkv.KVCacheConfig(
            num_layers=2,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            qk_head_dim=DIM,
            layers=[pkv.LayerSpec(), LANE],
            sliding_window=True,
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ValueError, "layers of kind 'index' and index_lane, .* need each other"),
        ({"index_lane": pkv.LayerSpec("mla")}, ValueError, "need each other"),
        ({"index_lane": "int8"}, TypeError, "index_lane must be a LayerSpec"),
        ({"index_lane": LANE, "attn_kind": ["mha"] * 3}, ValueError, "need each other"),
        (
            {"index_lane": LANE, "lists": False, "runtime": "stock"},
            ValueError,
            "need runtime 'pagedkv' and a CPU",
        ),
        ({"index_lane": replace(LANE, kv_dtype="int4")}, ValueError, "index keys are kept as"),
        *(
            ({"index_lane": LANE, "attn_kind": kinds}, ValueError, "need a layer of attention")
            for kinds in (["index"] * 3, ["linear", "index", "linear"])
        ),
    ],
)
def test_lanes_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        export_indexed(**changes)


def test_the_stock_runtime_has_no_lists():
    with pytest.raises(ValueError, match="lists need runtime 'pagedkv'"):
        export(runtime="stock")


def test_wrong_tensors():
    class Wrong(Lists):
        def attend(self, qkv, q, positions, cache: pkv.PagedKVCacheObject):
            return cache.attention_to_positions(0, qkv, q, HEADS, SCALE)

    plain = {"param_mode": "none", "effect_mode": "none"}
    row = spec.Tensor(["n", HEADS, DIM], "float32")
    cache = spec.Object(object_type=pkv.PagedKVCacheObject)
    arguments = {"qkv": row, "q": row, "positions": row, "cache": cache, "$": plain}
    with pytest.raises(ValueError, match="positions must be of type int32 and have 2 dimensions"):
        Wrong().export_tvm({"attend": arguments})


def test_wrong_tensors_of_index_lanes():
    class Wrong(Lists):
        def attend(self, q: nn.Tensor, weights: nn.Tensor, cache: pkv.PagedKVCacheObject):
            return cache.index_top_k(0, q, weights, 3)

    plain = {"param_mode": "none", "effect_mode": "none"}
    cache = spec.Object(object_type=pkv.PagedKVCacheObject)
    q, weights = spec.Tensor(["n", 2, 8], "float32"), spec.Tensor(["n", 2], "float16")
    arguments = {"q": q, "weights": weights, "cache": cache, "$": plain}
    with pytest.raises(ValueError, match="weights must be of type float32 and have 2 dimensions"):
        Wrong().export_tvm({"attend": arguments})
