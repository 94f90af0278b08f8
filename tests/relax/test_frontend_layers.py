# SPDX-License-Identifier: Apache-2.0
"""Layers of compiled Relax models with windows and rotations of their own."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as StockBase
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .. import reference
from ..reference.window import WindowedReferenceCache
from ..support.harness.selections import latin_square
from .test_frontend import (
    CAPACITIES,
    HEAD_DIM,
    MODEL_TARGET,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    SM_SCALE,
    AttentionOnly,
    _compile,
    _create,
    _qkv,
    check_fused,
)


@latin_square(2, "mode", "kinds")
@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.INLINE], ids=["normal", "inline"])
@pytest.mark.parametrize("kinds", [["mha_sliding", "mha"], "mha_sliding"], ids=["mixed", "all"])
def test_layers_with_a_window(kinds, mode):
    vm = _compile(pkv.PagedKVCache, {"mode": mode}, kinds=kinds, layer_sliding_window_size=7)
    cache = _create(vm)
    windows = [7, 7] if isinstance(kinds, str) else [7, None]
    rope = reference.Rope(rotary_dim=HEAD_DIM)
    check_fused(vm, cache, rope, mode.name.lower(), windows, num_tree_steps=2)
    cache.check_integrity()
    assert cache.first_position(1, 0) > 0


def test_layers_that_attend_within_chunks():
    """As in Llama 4: RoPE in these layers, none in the others."""
    modes, kinds = (RopeMode.NORMAL, RopeMode.NONE), ["mha_chunked", "mha"]
    vm = _compile(pkv.PagedKVCache, {"mode": modes}, kinds=kinds, layer_sliding_window_size=7)
    cache = _create(vm)
    rope = reference.Rope(rotary_dim=HEAD_DIM)
    check_fused(vm, cache, rope, ["normal", "none"], [-7, None], num_tree_steps=2)
    assert [layer["kind"] for layer in cache.description["layers"]] == kinds
    assert cache.first_position(1, 0) > 0


def test_spans():
    """Rows 3 to 15 of sequence 1 see each other, in the layer with a window within it."""
    vm = _compile(
        pkv.PagedKVCache, {"mode": RopeMode.NONE}, kinds=["mha_sliding", "mha"], spans=True,
        layer_sliding_window_size=7,
    )  # fmt: skip
    cache, lengths = _create(vm), [5, 20]
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    qkv = _qkv(np.random.default_rng(0), sum(lengths))
    begin = tvm.get_global_func("pagedkv.begin_forward_with_spans")
    begin(cache, Shape([0, 1]), Shape(lengths), Shape([1, 3, 16]))
    outputs = vm["fused"](tvm.runtime.tensor(qkv[None]), cache)
    cache.end_forward()
    q, k, v = np.split(qkv[5:], [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
    for layer, window in enumerate((7, None)):
        mask = reference.span_mask(0, 20, [(3, 16)], window)
        o, _ = reference.attention(q, k, v, mask, SM_SCALE)
        reference.assert_close(outputs[1 - layer].numpy()[0][5:], o, "float32", f"layer {layer}")


@pytest.mark.parametrize(
    "modes", [(RopeMode.NORMAL, RopeMode.NONE), (RopeMode.NONE, RopeMode.INLINE)], ids=str
)
def test_layers_without_rope_beside_layers_with_it(modes):
    kinds, windows = ["mha_sliding", "mha"], [7, None]
    vm = _compile(pkv.PagedKVCache, {"mode": modes}, kinds=kinds, layer_sliding_window_size=7)
    cache = _create(vm)
    rope = reference.Rope(rotary_dim=HEAD_DIM)
    names = [mode.name.lower() for mode in modes]
    check_fused(vm, cache, rope, names, windows, num_tree_steps=2)
    assert [layer["rope_mode"] for layer in cache.description["layers"]] == [*modes]


@pytest.mark.parametrize("mode", ["normal", pytest.param("inline", marks=pytest.mark.slow)])
def test_layers_with_rotations_of_their_own(mode):
    """As in Gemma 3 and 4: another base, a scaling, a part of the head."""
    share = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    ropes = [
        pkv.RopeConfig(mode, theta=1e4),
        pkv.RopeConfig(mode, theta=100.0, scale=0.5, rotary_dim=16, scaling=share),
    ]
    kinds, windows = ["mha_sliding", "mha"], [7, None]
    vm = _compile(
        pkv.PagedKVCache, {"mode": RopeMode.NONE}, kinds=kinds, layer_sliding_window_size=7,
        layer_ropes=ropes,
    )  # fmt: skip
    cache = _create(vm)
    rotations = [
        reference.Rope(rotary_dim=HEAD_DIM), reference.Rope(100.0, 0.5, 16, share),
    ]  # fmt: skip
    check_fused(vm, cache, rotations, mode, windows, num_tree_steps=2)
    first, second = cache.description["layers"]
    assert (first["rope_theta"], second["rope_theta"], second["rope_scale"]) == (1e4, 100.0, 0.5)
    assert '"rope_type": "proportional"' in cache.description["layout"]


def test_longrope_beside_a_layer_without_rope():
    """Its factors are a tensor of the model. Each sequence chooses the long ones by its length."""
    rng = np.random.default_rng(0)
    long, short = rng.uniform(1, 4, (2, HEAD_DIM // 2)).astype("float32")
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 20}
    rope = {"mode": (RopeMode.NORMAL, RopeMode.NONE), "scaling": scaling}
    factors = np.concatenate([long, short])
    vm = _compile(pkv.PagedKVCache, rope | {"factors": relax.const(factors)})
    known = scaling | {"long_factor": long, "short_factor": short}
    expected = reference.Rope(rotary_dim=HEAD_DIM, scaling=known)
    check_fused(vm, _create(vm), expected, ["normal", "none"], steps=([9, 5], [20, 1], [1, 1]))
    vm = _compile(pkv.PagedKVCache, rope)
    with pytest.raises(TypeError, match=r"config\['rope_ext_factors'\] has the wrong type: int"):
        _create(vm)


class OneOfTwo(AttentionOnly):
    """A model whose first layer keeps nothing."""

    def fused(self, qkv: nn.Tensor, cache: StockBase):
        return cache.attention_with_fused_qkv(1, qkv, NUM_QO_HEADS, SM_SCALE)


def test_what_is_said_of_layers_that_rotate_nothing_is_of_no_consequence():
    ropes = [pkv.RopeConfig(theta=1e4), pkv.RopeConfig(theta=100.0)]
    own = {"kinds": ["linear", "mha"], "layer_ropes": ropes}
    model = OneOfTwo(pkv.PagedKVCache, {"mode": RopeMode.NONE}, **own)
    plain = {"param_mode": "none", "effect_mode": "none"}
    qkv = spec.Tensor([1, "n", NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], "float32")
    module, _ = model.export_tvm(
        {
            "create": {name: int for name in CAPACITIES} | {"$": plain},
            "fused": {"qkv": qkv, "cache": spec.Object(object_type=StockBase), "$": plain},
        }
    )[:2]
    vm = relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())
    cache = _create(vm)
    cache.add_sequence(0)
    rows = _qkv(np.random.default_rng(0), 9)
    with cache.forward([0], [9]):
        vm["fused"](tvm.runtime.tensor(rows[None]), cache)
    k = rows[:, NUM_QO_HEADS : NUM_QO_HEADS + NUM_KV_HEADS]
    want = reference.rotate(k, np.arange(9), reference.Rope(100.0, rotary_dim=HEAD_DIM))
    reference.assert_close(cache.debug_get_kv(0)[0].numpy()[0], want, "float32")


@pytest.mark.parametrize("mode", [RopeMode.NONE, RopeMode.NORMAL], ids=["none", "normal"])
@pytest.mark.parametrize("includes_self", [False, True])
def test_windows_of_sequences_include_the_row_where_the_model_says_so(mode, includes_self):
    vm = _compile(pkv.PagedKVCache, {"mode": mode}, sliding_window_includes_self=includes_self)
    cache = _create(vm, support_sliding_window=1)
    expected = WindowedReferenceCache(
        NUM_LAYERS, np.float32, reference.Rope(rotary_dim=HEAD_DIM), mode.name.lower(),
        includes_self=includes_self,
    )  # fmt: skip
    cache.add_sequence(0)
    expected.add_sequence(0)
    cache.enable_sliding_window(0, 19, 3)
    expected.enable_window(0, 19, 3)
    rng = np.random.default_rng(0)
    for num_rows in (25, 1, 8, 1):
        qkv = _qkv(rng, num_rows)
        with cache.forward([0], [num_rows]):
            outputs = vm["fused"](tvm.runtime.tensor(qkv[None]), cache)
        for layer in range(NUM_LAYERS):
            o, _ = expected.attention(layer, [0], [num_rows], qkv, NUM_KV_HEADS, SM_SCALE)
            reference.assert_close(outputs[1 - layer].numpy()[0], o, "float32")
        expected.end_step([0])
    assert cache.sequence_length(0) == 19 - includes_self
