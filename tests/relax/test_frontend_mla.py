# SPDX-License-Identifier: Apache-2.0
"""The nn class with MLA layers inside a compiled Relax model."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as StockBase
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .. import reference
from ..support.harness.fast_compilation import MODEL_TARGET

HEADS, CKV, KPE, NOPE, V_DIM, NUM_LAYERS = 6, 32, 8, 16, 24, 2
QK_DIM = NOPE + KPE
SM_SCALE = QK_DIM**-0.5
CAPACITIES = {
    "max_batch_size": 4,
    "max_total_seq_len": 512,
    "prefill_chunk_size": 64,
    "page_size": 16,
    "support_sliding_window": 0,
}


class LatentAttention(nn.Module):
    """The attention of two MLA layers, in the three ways that models have."""

    num_layers, num_key_value_heads = NUM_LAYERS, 1

    def __init__(self, attn_kind, extra: dict):
        self.attn_kind, self.extra = attn_kind, extra
        self.w_v = nn.Parameter((HEADS, CKV, V_DIM), "float32")

    def create(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ):
        return pkv.PagedKVCache(
            attn_kind=self.attn_kind,
            max_batch_size=max_batch_size,
            max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=support_sliding_window,
            layer_partition=relax.ShapeExpr([0, self.num_layers]),
            num_hidden_layers=self.num_layers,
            num_attention_heads=HEADS,
            num_key_value_heads=self.num_key_value_heads,
            qk_head_dim=CKV + KPE,
            v_head_dim=CKV,
            mla_original_qk_head_dim=QK_DIM,
            mla_original_v_head_dim=V_DIM,
            rope_mode=RopeMode.NONE,
            rope_scale=1,
            rope_theta=10000,
            rope_scaling={},
            rope_ext_factors=relax.prim_value(0),
            rotary_dim=KPE,
            enable_disaggregation=False,
            dtype="float32",
            target=MODEL_TARGET,
            **self.extra,
        )

    def _absorbed(self, layer: int, q: nn.Tensor, cache: StockBase):
        o, lse = cache.cross_attention(layer, q, CKV, SM_SCALE)
        o = nn.op.matmul(nn.op.permute_dims(o, [0, 2, 1, 3]), self.w_v)
        return nn.op.permute_dims(o, [0, 2, 1, 3]), lse

    def decode(self, latent: nn.Tensor, q: nn.Tensor, cache: StockBase):
        outputs = []
        for layer in range(NUM_LAYERS):
            cache = cache.append_mla_kv(layer, latent)
            outputs.append(self._absorbed(layer, q, cache)[0])
        return tuple(outputs)

    def extend(
        self,
        latent: nn.Tensor,
        q: nn.Tensor,
        q_self: nn.Tensor,
        k: nn.Tensor,
        v: nn.Tensor,
        cache: StockBase,
    ):
        outputs = []
        for layer in range(NUM_LAYERS):
            cache = cache.append_mla_kv(layer, latent)
            own = cache.self_attention(layer, q_self, k, v, SM_SCALE)
            past = self._absorbed(layer, q, cache)
            merged, _ = cache.merge_attn_output_inplace(*own, *past)
            # Relax takes the storage of `own` for free after the merge, so it is used up here.
            outputs.append(merged + merged)
        return tuple(outputs)


def _rows(*shape) -> spec.Tensor:
    return spec.Tensor([1, "n", *shape], "float32")


def _compile(attn_kind="mla", **extra) -> relax.VirtualMachine:
    model = LatentAttention(attn_kind, extra)
    weights = {"param_mode": "plain", "effect_mode": "none"}
    cache = spec.Object(object_type=StockBase)
    absorbed = {"latent": _rows(1, CKV + KPE), "q": _rows(HEADS, CKV + KPE)}
    module, _ = model.export_tvm(
        {
            "create": {name: int for name in CAPACITIES}
            | {"$": {"param_mode": "none", "effect_mode": "none"}},
            "decode": {**absorbed, "cache": cache, "$": weights},
            "extend": {
                **absorbed,
                "q_self": _rows(HEADS, QK_DIM),
                "k": _rows(HEADS, QK_DIM),
                "v": _rows(HEADS, V_DIM),
                "cache": cache,
                "$": weights,
            },
        }
    )[:2]
    return relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())


def _check(
    vm: relax.VirtualMachine, page_size: int = 16, has_trees: bool = True, windows=None
) -> None:
    # In a step with trees cross attention alone covers the rows of the step as well.
    trees = (
        ([5, 3], "extend", [-1, 0, 0, -1, 2, -1, 0, 0]),
        ([1, 2], "decode", [4, 2, -1]),
        ([2, 1], "extend", [5, 6, 0]),
    )
    capacities = CAPACITIES | {"page_size": page_size}
    cache = vm["create"](*(Shape([n]) for n in capacities.values()))
    assert isinstance(cache, pkv.KVCache)
    rng = np.random.default_rng(0)
    w_k = rng.standard_normal((HEADS, NOPE, CKV)) / 4
    w_v = rng.standard_normal((HEADS, V_DIM, CKV)) / 4
    weight = tvm.runtime.tensor(w_v.transpose(0, 2, 1).astype("float32").copy())
    expected = reference.ReferenceLatentCache(NUM_LAYERS, np.float32, windows=windows)
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
        expected.add_sequence(seq_id)
    for lengths, name, *parents in (
        ([18, 5], "extend"),
        ([1, 1], "decode"),
        ([3, 1], "extend"),
        ([1, 1], "extend"),
        ([1, 1], "decode"),
        *(trees if has_trees else ()),
        ([1, 1], "decode"),
    ):
        n = sum(lengths)
        if parents:
            expected.grow_trees([0, 1], lengths, *parents)
        elif expected.trees[0]:
            cache.commit_tree([1, 0], [3, 5])
            expected.commit_tree(1, 3)
            expected.commit_tree(0, 5)
        latent = rng.standard_normal((n, CKV + KPE)).astype("float32")
        q = rng.standard_normal((n, HEADS, QK_DIM))
        inputs = [latent[:, None], reference.mla_absorb(q, w_k)]
        if name == "extend":
            inputs += [q, *reference.mla_expand(latent, w_k, w_v)]
        inputs = [tvm.runtime.tensor(x[None].astype("float32")) for x in inputs]
        with cache.forward([0, 1], lengths, *parents):
            outputs = vm[name](*inputs, cache, weight)
        for layer in range(NUM_LAYERS):
            expected.append(layer, [0, 1], lengths, latent)
            o, _ = expected.non_absorbed(layer, [0, 1], lengths, q, w_k, w_v, SM_SCALE)
            o = 2 * o if name == "extend" else o
            what = f"{name} {lengths} layer {layer}"
            reference.assert_close(outputs[layer].numpy()[0], o, "float32", what)
    cache.check_integrity()


@pytest.mark.parametrize("attn_kind", ["mla", ["mla", "mla"]], ids=["one", "list"])
def test_model_gives_what_the_reference_gives(attn_kind):
    _check(_compile(attn_kind))


@pytest.mark.parametrize("kinds", [["mla_sliding", "mla"], "mla_sliding"], ids=["some", "all"])
def test_layers_with_a_window(kinds):
    windows = [9, None] if isinstance(kinds, list) else [9, 9]
    _check(_compile(kinds, layer_sliding_window_size=9), windows=windows)


def test_layers_with_a_window_that_cannot_be():
    with pytest.raises(ValueError, match="'mla_sliding' layers need runtime 'pagedkv'"):
        _compile("mla_sliding", runtime="stock")


def test_kernels_without_tags_of_ours():
    """Kernels for the stock runtime keep its conventions, which this runtime serves too."""
    _check(_compile(runtime="stock"), has_trees=False)


class MixedAttention(LatentAttention):
    """An MHA layer, whose heads are as wide as a latent row, a linear one and an MLA layer."""

    num_layers, num_key_value_heads = 3, 2

    def step(self, qkv: nn.Tensor, latent: nn.Tensor, q: nn.Tensor, cache: StockBase):
        out = cache.attention_with_fused_qkv(0, qkv, HEADS, SM_SCALE)
        cache = cache.append_mla_kv(2, latent)
        return out, cache.cross_attention(2, q, CKV, SM_SCALE)[0]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_mha_linear_and_mla_layers_in_one_model(window):
    width = CKV + KPE
    if window is None:
        model = MixedAttention(["mha", "linear", "mla"], {"lists": True})
    else:
        kinds = ["mha", "linear", "mla_sliding"]
        model = MixedAttention(kinds, {"layer_sliding_window_size": window})
    plain = {"param_mode": "none", "effect_mode": "none"}
    module, _ = model.export_tvm(
        {
            "create": {name: int for name in CAPACITIES} | {"$": plain},
            "step": {
                "qkv": _rows(HEADS + 2 * 2, width),
                "latent": _rows(1, width),
                "q": _rows(HEADS, width),
                "cache": spec.Object(object_type=StockBase),
                "$": plain,
            },
        }
    )[:2]
    vm = relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())
    cache = vm["create"](*(Shape([n]) for n in CAPACITIES.values()))
    mha = reference.ReferenceCache(1, np.float32)
    mla = reference.ReferenceLatentCache(1, np.float32, windows=[window])
    rng = np.random.default_rng(0)
    for each in (cache, mha, mla):
        each.add_sequence(0)
    for step, (n, *parents) in enumerate(((1,), (18,), (1,), (4, [-1, 0, 0, 1]))):
        qkv = rng.standard_normal((n, HEADS + 4, width)).astype("float32")
        q, latent = qkv[:, :HEADS], qkv[:, HEADS]
        inputs = (tvm.runtime.tensor(x[None].copy()) for x in (qkv, latent[:, None], q))
        for each in (mha, mla) if parents else ():
            each.grow_trees([0], [n], *parents)
        with cache.forward([0], [n], *parents):
            outputs = vm["step"](*inputs, cache)
        o, _ = mha.attention(0, [0], [n], qkv, 2, SM_SCALE)
        reference.assert_close(outputs[0].numpy()[0], o, "float32", f"MHA, {n} rows")
        mla.append(0, [0], [n], latent)
        o, _ = mla.absorbed(0, [0], [n], q, CKV, SM_SCALE, with_step=n != 18)
        reference.assert_close(outputs[1].numpy()[0], o, "float32", f"MLA, {n} rows")
        if not parents:
            cache.fork_sequence(0, 1 + step)  # pages of both shapes are copied in the next step
    cache.commit_tree([0], [3])
    assert cache.stats()["cow_page_copies"] == 3 * 2
    cache.check_integrity()


def test_page_size_of_the_kernels_is_checked():
    vm = _compile(kernel_page_size=4)
    _check(vm, page_size=4)
    with pytest.raises(ValueError, match="compiled for pages of 4 slots, but page_size is 16"):
        vm["create"](*(Shape([n]) for n in CAPACITIES.values()))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
