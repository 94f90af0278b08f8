# SPDX-License-Identifier: Apache-2.0
"""A whole Relax model over this cache: define, export, compile, run. Its weights are random.

python examples/relax_model.py
"""

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

# The line that swaps the cache; PagedKVCacheObject is the type of one that functions are given.
from tvm_pagedkv import PagedKVCache, PagedKVCacheObject, native_target

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 2, 6, 2, 32, 258
HIDDEN = HEADS * DIM
target = native_target()  # this machine's CPU; tvm.target.Target("llvm") runs on all, and slower


class Block(nn.Module):
    def __init__(self):
        self.norm = nn.RMSNorm(HIDDEN, axes=-1, bias=False)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int):
        qkv = op.reshape(self.qkv(self.norm(x)), (1, x.shape[1], HEADS + 2 * KV_HEADS, DIM))
        o = cache.attention_with_fused_qkv(layer, qkv, HEADS, DIM**-0.5)
        return x + self.out(op.reshape(o, (1, x.shape[1], HIDDEN)))


class Decoder(nn.Module):
    def __init__(self):
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: nn.Tensor, cache: PagedKVCacheObject):
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(x)

    def create_cache(self, batch: tirx.Var, total: tirx.Var, chunk: tirx.Var):
        return PagedKVCache(
            attn_kind="mha", max_batch_size=batch, max_total_seq_len=total,
            prefill_chunk_size=chunk, page_size=16, support_sliding_window=0,
            layer_partition=relax.ShapeExpr([0, LAYERS]), num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, qk_head_dim=DIM,
            v_head_dim=DIM, mla_original_qk_head_dim=0, mla_original_v_head_dim=0,
            rope_mode=RopeMode.NORMAL, rope_scale=1, rope_theta=10000, rope_scaling={},
            rope_ext_factors=relax.prim_value(0), rotary_dim=DIM, enable_disaggregation=False,
            dtype="float32", target=target,
        )  # fmt: skip


signatures = {
    "forward": {
        "tokens": spec.Tensor([1, "rows"], "int32"),
        "cache": spec.Object(object_type=PagedKVCacheObject),
        "$": {"param_mode": "packed", "effect_mode": "none"},
    },
    "create_cache": {
        **dict.fromkeys(("batch", "total", "chunk"), int),
        "$": {"param_mode": "none", "effect_mode": "none"},
    },
}
module, parameters = Decoder().export_tvm(signatures)
tvm.compile(module, target).export_library("model.so")

vm = relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cpu())
cache = vm["create_cache"](Shape([4]), Shape([512]), Shape([64]))
random = np.random.default_rng(0)
values = [random.standard_normal(p.shape).astype("float32") / 10 for _, p in parameters]
weights = [tvm.runtime.tensor(value) for value in values]

cache.add_sequence(0)
text = step = [84, 104, 101]  # the prompt; then a token at a time
for _ in range(8):
    with cache.forward([0], [len(step)]):
        logits = vm["forward"](tvm.runtime.tensor(np.array([step], "int32")), cache, weights)
    step = [int(logits.numpy()[0, -1].argmax())]
    text = text + step
print(text, "in", cache.sequence_length(0), "positions")
