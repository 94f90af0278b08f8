# SPDX-License-Identifier: Apache-2.0
"""A decoder of the Llama family in ``tvm.relax.frontend.nn`` over `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as CacheObject
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm.target import Target

from tir_kernels.spec import VectorTarget

from ..build import vector_target
from ..frontend import PagedKVCache
from . import kernels
from .config import LlamaConfig
from .linear import PackedMatrix, embedding, linear


@dataclass(frozen=True)
class BuildOptions:
    """What the code of a model depends on besides its configuration."""

    dtype: str
    page_size: int
    target: Target
    sliding_window: bool = False  # whether sequences of its caches may have a window
    num_shards: int = 1  # workers that share the heads and the MLP of every layer
    layer_indptr: tuple[int, ...] = ()  # of pipeline stages, as `KVCacheConfig` has it; (): one
    stage: int = 0

    @property
    def vector(self) -> VectorTarget:
        """SIMD traits of the target."""
        return vector_target(self.target)

    def layers_of(self, config: LlamaConfig) -> range:
        """The layers of the stage."""
        indptr = self.layer_indptr or (0, config.num_layers)
        return range(*indptr[self.stage : self.stage + 2])

    @property
    def is_first(self) -> bool:
        """Whether the stage takes tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives logits."""
        return self.stage + 2 >= len(self.layer_indptr)


class Linear(nn.Module):
    """``x @ weight.T (+ bias) (+ residual)`` over packed weights, for x [n, in_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        bias: bool = False,
        out_dtype: str | None = None,
    ):
        self.options, self.out_dtype = options, out_dtype or options.dtype
        self.matrix = PackedMatrix(out_features, in_features, options.dtype, options.vector)
        self.weight = nn.Parameter(self.matrix.shape, options.dtype)
        self.bias = nn.Parameter((out_features,), options.dtype) if bias else None

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None = None) -> nn.Tensor:
        kernel = linear(
            self.matrix, self.out_dtype, bias=self.bias is not None, residual=residual is not None
        )
        inputs = [x, self.weight, self.bias, residual]
        out = nn.Tensor.placeholder((x.shape[0], self.matrix.out_features), self.out_dtype)
        return op.tensor_ir_op(kernel, "linear", [i for i in inputs if i is not None], out)


class SplitLinear(Linear):
    """`Linear` over the worker's share of the input features; the workers add up what they have."""

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, bias: bool = False
    ):
        out_dtype = "float32" if options.num_shards > 1 else None
        super().__init__(in_features // options.num_shards, out_features, options, bias, out_dtype)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        if self.options.num_shards == 1:
            return super().forward(x, residual)
        total = op.ccl_allreduce(super().forward(x), "sum")
        return op.astype(op.astype(residual, "float32") + total, self.options.dtype)


class Norm(nn.Module):
    """RMS norm of the rows of x [n, features]."""

    def __init__(self, config: LlamaConfig, options: BuildOptions):
        self.features, self.epsilon = config.hidden_size, config.rms_norm_eps
        self.options = options
        self.weight = nn.Parameter((self.features,), options.dtype)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        options = self.options
        kernel = kernels.rms_norm(self.features, self.epsilon, options.dtype, options.vector)
        out = nn.Tensor.placeholder(x.shape, options.dtype)
        return op.tensor_ir_op(kernel, "rms_norm", [x, self.weight], out)


class Attention(nn.Module):
    """Projections around the attention of the cache, which rotates, appends and attends."""

    def __init__(self, config: LlamaConfig, options: BuildOptions):
        self.num_heads, self.head_dim = config.num_heads // options.num_shards, config.head_dim
        self.num_rows = self.num_heads + 2 * (config.num_kv_heads // options.num_shards)
        width, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = Linear(width, self.num_rows * self.head_dim, options, bias)
        self.o_proj = SplitLinear(config.num_heads * self.head_dim, width, options, bias)

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor, cache: CacheObject, layer: int
    ) -> nn.Tensor:
        n = x.shape[0]
        qkv = op.reshape(self.qkv_proj(x), (1, n, self.num_rows, self.head_dim))
        scale = self.head_dim**-0.5
        out = cache.attention_with_fused_qkv(layer, qkv, self.num_heads, scale)
        return self.o_proj(op.reshape(out, (n, self.num_heads * self.head_dim)), residual)


class Mlp(nn.Module):
    """SwiGLU between two projections."""

    def __init__(self, config: LlamaConfig, options: BuildOptions):
        self.width, self.options = config.intermediate_size // options.num_shards, options
        bias = config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * self.width, options, bias)
        width = config.intermediate_size
        self.down_proj = SplitLinear(width, config.hidden_size, options, bias)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        kernel = kernels.swiglu(self.width, self.options.dtype, self.options.vector)
        out = nn.Tensor.placeholder((x.shape[0], self.width), self.options.dtype)
        gated = op.tensor_ir_op(kernel, "swiglu", [self.gate_up_proj(x)], out)
        return self.down_proj(gated, residual)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig, options: BuildOptions):
        self.self_attn, self.mlp = Attention(config, options), Mlp(config, options)
        self.input_layernorm = Norm(config, options)
        self.post_attention_layernorm = Norm(config, options)

    def forward(self, x: nn.Tensor, cache: CacheObject, layer: int) -> nn.Tensor:
        x = self.self_attn(self.input_layernorm(x), x, cache, layer)
        return self.mlp(self.post_attention_layernorm(x), x)


class Llama(nn.Module):
    """The functions of the compiled model; T is the number of rows of a step, over all sequences.

    - ``create_kv_cache(max_num_sequences, max_total_tokens, prefill_chunk_size,
      enable_kv_transfer)`` -> cache
    - ``embed(ids int32 [T])`` -> x [T, hidden_size]
    - ``prefill(x, rows int32 [b], cache)`` -> logits float32 [b, vocab_size] of the chosen rows
    - ``decode(x, cache)`` -> logits float32 [T, vocab_size] of every row

    Of several pipeline stages, the first has `embed` and the last `prefill` and `decode`, over its
    own layers; the others have ``hidden(x, cache)`` -> x.
    """

    def __init__(self, config: LlamaConfig, options: BuildOptions):
        self.config, self.options = config, options
        size, width = config.vocab_size, config.hidden_size
        self.vocabulary = PackedMatrix(size, width, options.dtype, options.vector)
        own = options.layers_of(config)
        self.first_layer = own.start
        self.layers = nn.ModuleList([Block(config, options) for _ in own])
        if options.is_last:
            self.norm = Norm(config, options)
            self.lm_head = Linear(width, size, options, out_dtype="float32")
        self.shares_head = config.tied_embeddings and options.is_last
        if options.is_first and not self.shares_head:
            self.embed_tokens = nn.Parameter(self.vocabulary.shape, options.dtype)

    def embed(self, ids: nn.Tensor) -> nn.Tensor:
        kernel = embedding(self.vocabulary)
        out = nn.Tensor.placeholder((ids.shape[0], self.config.hidden_size), self.options.dtype)
        weight = self.lm_head.weight if self.shares_head else self.embed_tokens
        return op.tensor_ir_op(kernel, "embedding", [ids, weight], out)

    def hidden(self, x: nn.Tensor, cache: CacheObject) -> nn.Tensor:
        for index, layer in enumerate(self.layers, self.first_layer):
            x = layer(x, cache, index)
        return x

    def prefill(self, x: nn.Tensor, rows: nn.Tensor, cache: CacheObject) -> nn.Tensor:
        options, width = self.options, self.config.hidden_size
        kernel = kernels.take_rows(width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((rows.shape[0], width), options.dtype)
        last = op.tensor_ir_op(kernel, "take_rows", [self.hidden(x, cache), rows], out)
        return self.lm_head(self.norm(last))

    def decode(self, x: nn.Tensor, cache: CacheObject) -> nn.Tensor:
        return self.lm_head(self.norm(self.hidden(x, cache)))

    def create_kv_cache(
        self,
        max_num_sequences: tirx.Var,
        max_total_tokens: tirx.Var,
        prefill_chunk_size: tirx.Var,
        enable_kv_transfer: tirx.Var,
    ) -> CacheObject:
        config, options, rope = self.config, self.options, self.config.rope
        scaling, factors = rope.scaling_dict, relax.prim_value(0)
        if scaling.get("rope_type") == "longrope":
            both = [*scaling["long_factor"], *scaling["short_factor"]]
            factors = relax.const(np.array(both, "float32"))
        return PagedKVCache(
            attn_kind=config.layer_kind,
            max_batch_size=max_num_sequences,
            max_total_seq_len=max_total_tokens,
            prefill_chunk_size=prefill_chunk_size,
            page_size=options.page_size,
            support_sliding_window=int(options.sliding_window),
            layer_partition=relax.ShapeExpr(options.layer_indptr or (0, config.num_layers)),
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads // options.num_shards,
            num_key_value_heads=config.num_kv_heads // options.num_shards,
            qk_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            # What is in a window moves with it, so it is rotated when it is read.
            rope_mode=RopeMode.INLINE if options.sliding_window else RopeMode.NORMAL,
            rope_scale=1.0,
            rope_theta=rope.theta,
            rope_scaling=scaling,
            rope_ext_factors=factors,
            rotary_dim=rope.rotary_dim,
            enable_disaggregation=enable_kv_transfer,
            dtype=options.dtype,
            target=options.target,
            layer_sliding_window_size=config.sliding_window or 1,
        )


def build_module(config: LlamaConfig, options: BuildOptions) -> tvm.IRModule:
    """The model as an IRModule whose functions take the weights as one packed argument."""
    packed = {"param_mode": "packed", "effect_mode": "none"}
    x = spec.Tensor(["n", config.hidden_size], options.dtype)
    cache = spec.Object(object_type=CacheObject)
    capacities = (
        "max_num_sequences",
        "max_total_tokens",
        "prefill_chunk_size",
        "enable_kv_transfer",
    )
    functions = {
        "create_kv_cache": dict.fromkeys(capacities, int)
        | {"$": {"param_mode": "none", "effect_mode": "none"}},
    }
    if options.is_first:
        functions["embed"] = {"ids": spec.Tensor(["n"], "int32"), "$": packed}
    if options.is_last:
        rows = spec.Tensor(["b"], "int32")
        functions["prefill"] = {"x": x, "rows": rows, "cache": cache, "$": packed}
        functions["decode"] = {"x": x, "cache": cache, "$": packed}
    else:
        functions["hidden"] = {"x": x, "cache": cache, "$": packed}
    module, _, _ = Llama(config, options).export_tvm(functions, allow_extern=True)
    return module


@dataclass(frozen=True)
class Weight:
    """One packed argument of the model: its Hugging Face parts, stacked along the first axis.

    Parameters
    ----------
    parts : tuple of (name, shape)
    is_matrix : bool
        Whether the stacked tensor is packed for the linear kernel.
    split : {"rows", "columns", "first"}, optional
        What a worker has of every part where several share the layer: its share of the rows, or of
        the columns; "first": the first worker has it, and the others zeros. None: all have all.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    is_matrix: bool
    split: str | None = None

    def share(self, part: np.ndarray, shard: int, num_shards: int) -> np.ndarray:
        """What worker `shard` of `num_shards` has of a part."""
        if self.split is None:
            return part
        if self.split == "first":
            return part if shard == 0 else np.zeros_like(part)
        return np.split(part, num_shards, axis=("rows", "columns").index(self.split))[shard]


def weights(config: LlamaConfig, layers: range) -> Iterator[tuple[str, Weight]]:
    """Name in the model and source of every weight; its layers are these of the whole."""
    c, hidden = config, config.hidden_size
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def dense(ours: str, in_features: int, has_bias: bool, split: str, *parts: tuple[str, int]):
        matrix = tuple((f"{name}.weight", (width, in_features)) for name, width in parts)
        yield f"{ours}.weight", Weight(matrix, True, split)
        if has_bias:
            bias = tuple((f"{name}.bias", (width,)) for name, width in parts)
            yield f"{ours}.bias", Weight(bias, False, "rows" if split == "rows" else "first")

    embedding = Weight((("model.embed_tokens.weight", (c.vocab_size, hidden)),), True)
    yield "embed_tokens", embedding
    if c.tied_embeddings:
        yield "lm_head.weight", embedding
    else:
        yield "lm_head.weight", Weight((("lm_head.weight", (c.vocab_size, hidden)),), True)
    for index, i in enumerate(layers):
        ours, theirs = f"layers.{index}", f"model.layers.{i}"
        qkv = [("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)]
        qkv = [(f"{theirs}.self_attn.{name}", width) for name, width in qkv]
        gate_up = [
            (f"{theirs}.mlp.{name}", c.intermediate_size) for name in ("gate_proj", "up_proj")
        ]
        o_proj = (f"{theirs}.self_attn.o_proj", hidden)
        down = (f"{theirs}.mlp.down_proj", hidden)
        attention, mlp, width = f"{ours}.self_attn", f"{ours}.mlp", c.intermediate_size
        yield from dense(f"{attention}.qkv_proj", hidden, c.attention_bias, "rows", *qkv)
        yield from dense(f"{attention}.o_proj", q_width, c.attention_bias, "columns", o_proj)
        yield from dense(f"{mlp}.gate_up_proj", hidden, c.mlp_bias, "rows", *gate_up)
        yield from dense(f"{mlp}.down_proj", width, c.mlp_bias, "columns", down)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{ours}.{norm}.weight", Weight(((f"{theirs}.{norm}.weight", (hidden,)),), False)
    yield "norm.weight", Weight((("model.norm.weight", (hidden,)),), False)
