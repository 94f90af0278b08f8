# SPDX-License-Identifier: Apache-2.0
"""`SharedAttention`: layers that attend to the K and V of an earlier layer.

They have a projection of Q only, and the cache keeps nothing for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.codec import Codec, CodecPair
from tvm_pagedkv.config import LayerSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..config.part import AttentionPart
from ..kernels.rows import norms
from ..weights.weight_parts import Output, Weights, columns, rows, vector
from .attention import Attention
from .heads import Heads
from .projections import Linear, SplitLinear
from .step_rows import StepRows

_OF_KV = re.compile(r"\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)$")


@dataclass(frozen=True)
class SharedAttention(AttentionPart):
    """Attention of a layer to the K and V of an earlier one.

    Checkpoints may have projections and norms of K and V for it, which were never trained.

    Parameters
    ----------
    source : int
        The earlier layer.
    attention : Attention
        That of the earlier layer.
    """

    source: int
    attention: Attention

    is_connected = True

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec("linear"),)

    @property
    def pages(self) -> LayerSpec:
        return self.attention.pages

    @property
    def product_width(self) -> int:
        return self.attention.product_width

    def position_bytes(self, itemsize: int, codec: Codec | CodecPair | None) -> int:
        return self.attention.position_bytes(itemsize, codec)

    @property
    def shared_counts(self) -> dict[str, int]:
        return self.attention.shared_counts

    def is_unused(self, tensor: str) -> bool:
        return _OF_KV.search(tensor) is not None

    def without_cache(self) -> SharedAttention:
        return SharedAttention(self.source, self.attention.without_cache())

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> SharedAttentionBlock:
        return SharedAttentionBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        of, hidden = self.attention, config.hidden_size
        theirs, width = f"{theirs}.{of.names.block}", of.num_heads * of.head_dim
        q_proj = [Output("q_proj", width)]
        yield from rows(f"{ours}.q_proj", theirs, q_proj, hidden, bias=of.qkv_bias)
        out = f"{ours}.o_proj", f"{theirs}.{of.names.output}"
        yield from columns(*out, (hidden, width), bias=of.o_bias)
        if of.qk_norm == "head":
            tensor = f"{theirs}.{of.names.q_norm}.weight"
            yield vector(f"{ours}.q_norm", tensor, of.head_dim, offset=config.norm_offset)


class SharedAttentionBlock(nn.Module):
    """The projections before and after attention to an earlier layer's K and V."""

    def __init__(
        self, shape: SharedAttention, config: DecoderConfig, options: BuildOptions, name: str
    ):
        of, hidden = shape.attention, config.hidden_size
        self.source, self.heads = shape.source, Heads(of.head_dim, of.spec.rope, options)
        self.num_heads, self.num_kv_heads, self.dim = of.num_heads, of.num_kv_heads, of.head_dim
        self.scale, self.epsilon, self.options = of.sm_scale, config.norm_eps, options
        width = self.num_heads * self.dim
        self.q_proj = Linear(hidden, width, options, of.qkv_bias, name=f"{name}.q_proj")
        self.q_norm = nn.Parameter((self.dim,), "float32") if of.qk_norm == "head" else None
        self.o_proj = SplitLinear(width, hidden, options, of.o_bias, name=f"{name}.o_proj")

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        step: StepRows,
    ) -> nn.Tensor:
        n, dim, options = x.shape[0], self.dim, self.options
        q = self.q_proj(x)
        if self.q_norm is not None:
            kernel = norms.norm(dim, self.epsilon, options.dtype, options.vector)
            heads = op.reshape(q, (n * self.num_heads, dim))
            normed = op.tensor_ir_op(kernel, "norm", [heads, self.q_norm], heads)
            q = op.reshape(normed, (n, self.num_heads * dim))
        q = self.heads.take(q, 0, self.num_heads, cache)
        kv_shape = (1, n, self.num_kv_heads, dim)
        k, v = (op.reshape(each, kv_shape) for each in step.shared_kv[self.source])
        q = op.reshape(q, (1, n, self.num_heads, dim))
        out = cache.attention_with_shared_kv(self.source, q, k, v, self.scale)
        return self.o_proj(op.reshape(out, (n, self.num_heads * dim)), residual)
