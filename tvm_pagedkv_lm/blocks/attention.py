# SPDX-License-Identifier: Apache-2.0
"""`Attention`: heads of Q that attend to K and V in the cache, with the options of all families."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.codec import Codec, CodecPair
from tvm_pagedkv.config import LayerSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.index_config import IndexConfig
from ..config.options import BuildOptions
from ..config.part import NOT_SHARED, AttentionPart
from ..config.query_scale import QueryScale
from ..kernels.rows import gates, norms, row_kernels
from ..weights.weight_parts import Output, Part, Weight, Weights, columns, halves, rows, slices
from .block_indexer import BlockIndexer, block_indexer_weights
from .heads import Heads
from .norm import norm_weight
from .projections import Linear, SplitLinear
from .step_rows import StepRows


@dataclass(frozen=True)
class AttentionNames:
    """Names of the tensors of attention in checkpoints.

    Parameters
    ----------
    block : str
        The part of a layer that has the others.
    q_norm, k_norm, sinks, output : str
    fused_qkv : str, optional
        One tensor for Q, K and V. None: they have tensors of their own.
    index : str
        What the names of tensors of an indexer of blocks begin with.
    """

    block: str = "self_attn"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    output: str = "o_proj"
    fused_qkv: str | None = None
    index: str = "indexer."


@dataclass(frozen=True)
class Attention(AttentionPart):
    """Attention to the rows of K and V of each head.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
    spec : LayerSpec
        Kind, window and rotation, and the heads where the cache has others by default.
    scale : float, optional
        Factor on the attention logits; None: ``head_dim ** -0.5``.
    qkv_bias, o_bias : bool
    qk_norm : {"head", "projection", "unit"}, optional
        RMS norm of Q and K before the rotation: per head with shared weights, over all heads, or
        per head without weights.
    v_norm : bool
        Whether V of each head has an RMS norm without weights.
    v_is_k : bool
        Whether V is the projection of K, before norms and the rotation.
    query_scale : QueryScale, optional
    has_gate : bool
        Whether the output is multiplied by the sigmoid of a gate, whose rows follow those of each
        head in the projection of Q.
    has_sinks : bool
        Whether each query head has a learned sink.
    interleaved_rope : bool
        Whether the checkpoint's rotation pairs adjacent features of Q and K. Loading permutes them.
    is_source : bool
        Whether later layers attend to its K and V.
    index : IndexConfig, optional
        The heads that choose blocks of positions for each KV head.
    qkv_scales : (float, float, float)
    output_scale : float
        Factors on the outputs of projections, by which their weights are multiplied on loading.
    names : AttentionNames
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    spec: LayerSpec = LayerSpec()
    scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    v_norm: bool = False
    v_is_k: bool = False
    query_scale: QueryScale | None = None
    has_gate: bool = False
    has_sinks: bool = False
    interleaved_rope: bool = False
    is_source: bool = False
    index: IndexConfig | None = None
    qkv_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    output_scale: float = 1.0
    names: AttentionNames = AttentionNames()

    @property
    def sm_scale(self) -> float:
        """Factor on the attention logits."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        return (self.spec,) if self.index is None else (self.spec, self.index.cache_layer)

    @property
    def pages(self) -> LayerSpec:
        return self.spec

    @property
    def product_width(self) -> int:
        return self.num_heads * self.head_dim

    def position_bytes(self, itemsize: int, codec: Codec | CodecPair | None) -> int:
        dim = self.head_dim
        if codec is None:
            return self.num_kv_heads * 2 * dim * itemsize
        both = codec.k, codec.v
        return self.num_kv_heads * sum(x.row_bytes(dim) + x.scale_bytes(dim, dim) for x in both)

    @property
    def whole_because(self) -> str | None:
        if self.qk_norm == "projection":
            return (
                "the model normalizes Q and K over all heads (OLMo 2 and 3, MiniMax M2), which "
                "workers that share the heads do not do"
            )
        if self.index is not None:
            return "workers do not share the heads of an indexer (MiniMax M3)"
        if self.spec.num_kv_heads or self.spec.qk_head_dim:
            return f"workers do not share {NOT_SHARED}"
        return None

    @property
    def shared_counts(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    def without_cache(self) -> Attention:
        rope = self.spec.rope if self.is_source else None  # by which the model rotates
        heads = self.spec.num_kv_heads, self.spec.qk_head_dim
        return replace(self, spec=LayerSpec(num_kv_heads=heads[0], qk_head_dim=heads[1], rope=rope))

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> AttentionBlock:
        return AttentionBlock(self, config, options, name, layer)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        names, hidden, theirs = self.names, config.hidden_size, f"{theirs}.{self.names.block}"
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = q_width, kv_width, kv_width
        if names.fused_qkv:
            outputs = slices(names.fused_qkv, *widths, scales=self.qkv_scales)
        else:
            projections = zip(("q_proj", "k_proj", "v_proj"), widths, self.qkv_scales, strict=True)
            outputs = [Output(name, width, scale=scale) for name, width, scale in projections]
        if self.v_is_k:
            del outputs[-1]
        if self.has_gate:
            outputs[0], gate = halves("q_proj", self.num_heads, self.head_dim)
            yield from rows(f"{ours}.gate", theirs, [gate], hidden, bias=self.qkv_bias)
        if self.interleaved_rope:
            outputs[:2] = [each._replace(paired=self.head_dim) for each in outputs[:2]]
        yield from rows(f"{ours}.qkv_proj", theirs, outputs, hidden, bias=self.qkv_bias)
        out, scale = f"{theirs}.{names.output}", self.output_scale
        shape = hidden, q_width
        yield from columns(f"{ours}.o_proj", out, shape, bias=self.o_bias, scale=scale)
        if self.index is not None and self.index.chooses:
            to = f"{ours}.indexer", theirs, names.index
            yield from block_indexer_weights(self.index, config, *to)
        if self.has_sinks:
            sinks = Part(f"{theirs}.{names.sinks}", (self.num_heads,))
            yield f"{ours}.sinks", Weight((sinks,), False, "rows")
        if self.qk_norm in ("head", "projection"):
            normed = (self.head_dim,) * 2 if self.qk_norm == "head" else (q_width, kv_width)
            for name, tensor, width in zip("qk", (names.q_norm, names.k_norm), normed, strict=True):
                weight = f"{ours}.qk_norm.{name}_weight"
                yield norm_weight(config, weight, f"{theirs}.{tensor}", width)


class QkNorm(nn.Module):
    """RMS norm of Q, K and V in rows of them: per head, or of Q and K over all heads."""

    def __init__(self, shape: Attention, config: DecoderConfig, options: BuildOptions):
        self.options, self.epsilon, dim = options, config.norm_eps, shape.head_dim
        heads = shape.num_heads, shape.num_kv_heads
        num_q, num_k = (count // options.num_shards for count in heads)
        self.v_width = num_k * dim
        self.v = "as_is"
        if shape.v_norm:
            self.v = "unit_of_k" if shape.v_is_k else "unit"
        has_weights = shape.qk_norm != "unit"
        if shape.qk_norm != "projection":
            self.q, self.k = (num_q, dim), (num_k, dim)
        else:
            self.q, self.k = (1, num_q * dim), (1, num_k * dim)
        self.q_weight, self.k_weight = (
            nn.Parameter((width,), "float32")
            if has_weights
            else nn.Tensor.from_const(np.ones(width, "float32"))
            for width in (self.q[1], self.k[1])
        )

    def forward(self, qkv: nn.Tensor) -> nn.Tensor:
        options = self.options
        kernel = norms.qk_norm(
            self.q, self.k, self.v_width, self.epsilon, options.dtype, options.vector, v=self.v
        )
        width = sum(count * width for count, width in (self.q, self.k)) + self.v_width
        out = nn.Tensor.placeholder((qkv.shape[0], width), options.dtype)
        return op.tensor_ir_op(kernel, "qk_norm", [qkv, self.q_weight, self.k_weight], out)


class AttentionBlock(nn.Module):
    """The projections before and after the cache's attention."""

    def __init__(
        self,
        shape: Attention,
        config: DecoderConfig,
        options: BuildOptions,
        name: str,
        layer: int,
    ):
        self.num_heads = shape.num_heads // options.num_shards
        self.num_kv_heads = shape.num_kv_heads // options.num_shards
        self.head_dim = shape.head_dim
        self.num_rows = self.num_heads + 2 * self.num_kv_heads
        self.scale, width, self.options = shape.sm_scale, config.hidden_size, options
        self.shared = Heads(self.head_dim, shape.spec.rope, options) if shape.is_source else None
        num_projected = self.num_rows - (self.num_kv_heads if shape.v_is_k else 0)
        rows = num_projected * self.head_dim
        self.qkv_proj = Linear(width, rows, options, shape.qkv_bias, name=f"{name}.qkv_proj")
        self.qk_norm = QkNorm(shape, config, options) if shape.qk_norm else None
        self.query_scale = shape.query_scale
        self.budget = dict(options.budgets).get(layer)
        self.gate = self.sinks = self.indexer = None
        if shape.index is not None and shape.index.chooses:
            self.indexer = BlockIndexer(shape.index, config, options, f"{name}.indexer")
        if shape.has_sinks:
            self.sinks = nn.Parameter((self.num_heads,), "float32")
        if shape.has_gate:
            q_width = self.num_heads * self.head_dim
            self.gate = Linear(width, q_width, options, shape.qkv_bias, name=f"{name}.gate")
        self.o_proj = SplitLinear(
            shape.num_heads * self.head_dim, width, options, shape.o_bias, name=f"{name}.o_proj"
        )

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        step: StepRows,
    ) -> nn.Tensor:
        n, qkv = x.shape[0], self.qkv_proj(x)
        if self.qk_norm is not None:
            qkv = self.qk_norm(qkv)
        if self.query_scale is not None:
            qkv = self._scale_queries(qkv, cache.get_query_positions(n))
        if self.shared is not None:
            count = self.num_kv_heads
            k = self.shared.take(qkv, self.num_heads, count, cache)
            v = self.shared.take(qkv, self.num_heads + count, count, cache, rotates=False)
            step.shared_kv[layer] = k, v
        qkv = op.reshape(qkv, (1, n, self.num_rows, self.head_dim))
        how = self.num_heads, self.scale, self.sinks
        if self.indexer is not None:
            blocks, size = self.indexer(x, cache, layer + 1), self.indexer.blocks.size
            out = cache.attention_to_blocks(layer, op.squeeze(qkv, 0), blocks, size, *how)
        elif self.budget is not None and step.is_decode:
            out = cache.attention_within_budget(layer, op.squeeze(qkv, 0), self.budget, *how)
        else:
            out = cache.attention_with_fused_qkv(layer, qkv, *how)
        q_width = self.num_heads * self.head_dim
        out = op.reshape(out, (n, q_width))
        if self.gate is not None:
            kernel = gates.multiply("sigmoid", q_width, self.options.dtype, self.options.vector)
            out = op.tensor_ir_op(kernel, "multiply", [out, self.gate(x)], out)
        return self.o_proj(out, residual)

    def _scale_queries(self, qkv: nn.Tensor, positions: nn.Tensor) -> nn.Tensor:
        assert self.query_scale is not None
        kernel = row_kernels.scale_queries(
            self.num_heads * self.head_dim,
            self.num_rows * self.head_dim,
            self.query_scale,
            self.options.dtype,
            self.options.vector,
        )
        out = nn.Tensor.placeholder(qkv.shape, self.options.dtype)
        return op.tensor_ir_op(kernel, "scale_queries", [qkv, positions], out)
