# SPDX-License-Identifier: Apache-2.0
"""The blocks of decoders in ``tvm.relax.frontend.nn``, with the options of all families."""

from __future__ import annotations

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import KV_KINDS
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import row_kernels as kernels
from .altup import AltUpLayer, Laurel
from .beside_mlp import ExpertsBesideMlp
from .block_indexer import BlockIndexer
from .latent import LatentAttention
from .latent_choice import SparseLatentAttention
from .mixers import mixer_of, share_of
from .mlp import Mlp
from .moe import MixtureOfExperts
from .per_layer import PerLayerInput
from .projections import Linear, SplitLinear
from .shared_kv import Heads, SharedAttention, StepRows

KEPT_BESIDE = ("index", "linear")  # layers of the cache that belong to attention before them


class Norm(nn.Module):
    """Norm of the rows of x ``[n, features]``, plus a residual if one is given."""

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        self.features, self.epsilon = config.hidden_size, config.norm_eps
        self.options, self.subtracts_mean = options, config.norm_subtracts_mean
        self.weight = nn.Parameter((self.features,), "float32")

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None = None, scale: nn.Tensor | None = None
    ) -> nn.Tensor:
        """Return the norm plus the residual, times a scale float32 [1]."""
        kernel = kernels.norm(
            self.features,
            self.epsilon,
            self.options.dtype,
            self.options.vector,
            residual=residual is not None,
            scaled=scale is not None,
            subtracts_mean=self.subtracts_mean,
        )
        inputs = [x, self.weight, *(each for each in (residual, scale) if each is not None)]
        out = nn.Tensor.placeholder(x.shape, self.options.dtype)
        return op.tensor_ir_op(kernel, "norm", inputs, out)


class QkNorm(nn.Module):
    """RMS norm of Q, K and V in rows of them: per head, or of Q and K over all heads."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, layer: int):
        self.options, self.epsilon = options, config.norm_eps
        heads = config.num_heads, config.kv_heads_of(layer)
        num_q, num_k = (count // options.num_shards for count in heads)
        dim = config.head_dim_of(layer)
        self.v_width = num_k * dim
        self.v = "as_is"
        if config.v_norm:
            self.v = "unit_of_k" if layer in config.v_of_k else "unit"
        has_weights = config.qk_norm != "unit"
        if config.qk_norm != "projection":
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
        kernel = kernels.qk_norm(
            self.q, self.k, self.v_width, self.epsilon, options.dtype, options.vector, v=self.v
        )
        width = sum(count * width for count, width in (self.q, self.k)) + self.v_width
        out = nn.Tensor.placeholder((qkv.shape[0], width), options.dtype)
        return op.tensor_ir_op(kernel, "qk_norm", [qkv, self.q_weight, self.k_weight], out)


class Attention(nn.Module):
    """The projections before and after the cache's attention."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, name: str, layer: int):
        self.num_heads = config.num_heads // options.num_shards
        self.num_kv_heads = config.kv_heads_of(layer) // options.num_shards
        self.head_dim = config.head_dim_of(layer)
        self.num_rows = self.num_heads + 2 * self.num_kv_heads
        self.scale, width, self.options = config.sm_scale, config.hidden_size, options
        is_source = layer in dict(config.shared_kv).values()
        rope = config.layers_of(layer)[0].rope
        self.shared = Heads(self.head_dim, rope, options) if is_source else None
        num_projected = self.num_rows - (self.num_kv_heads if layer in config.v_of_k else 0)
        rows = num_projected * self.head_dim
        self.qkv_proj = Linear(width, rows, options, config.qkv_bias, name=f"{name}.qkv_proj")
        self.qk_norm = self.query_scale = None
        if config.qk_norm and (config.qk_norm_layers is None or layer in config.qk_norm_layers):
            self.qk_norm = QkNorm(config, options, layer)
        if config.query_scale is not None and layer in config.query_scale.layers:
            self.query_scale = config.query_scale
        self.budget = dict(options.budgets).get(layer)
        self.gate = self.sinks = self.indexer = None
        if config.indexer is not None and layer in config.indexer.layers:
            self.indexer = BlockIndexer(config, options, layer, f"{name}.indexer")
        if config.sink_logits:
            self.sinks = nn.Parameter((self.num_heads,), "float32")
        if config.attention_gate:
            q_width = self.num_heads * self.head_dim
            self.gate = Linear(width, q_width, options, config.qkv_bias, name=f"{name}.gate")
        self.o_proj = SplitLinear(
            config.num_heads * self.head_dim, width, options, config.o_bias, name=f"{name}.o_proj"
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
            kernel = kernels.multiply("sigmoid", q_width, self.options.dtype, self.options.vector)
            out = op.tensor_ir_op(kernel, "multiply", [out, self.gate(x)], out)
        return self.o_proj(out, residual)

    def _scale_queries(self, qkv: nn.Tensor, positions: nn.Tensor) -> nn.Tensor:
        assert self.query_scale is not None
        kernel = kernels.scale_queries(
            self.num_heads * self.head_dim,
            self.num_rows * self.head_dim,
            self.query_scale,
            self.options.dtype,
            self.options.vector,
        )
        out = nn.Tensor.placeholder(qkv.shape, self.options.dtype)
        return op.tensor_ir_op(kernel, "scale_queries", [qkv, positions], out)


class Block(nn.Module):
    """One layer: attention or a mixer, then the MLP or experts, with norms before or after them.

    Where a layer has attention and a mixer, both see the same rows, and their outputs are added.
    The MLP is beside them as well where it is parallel.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: BuildOptions,
        name: str,
        layer: int,
    ):
        def norm(name: str | None) -> Norm | None:
            return Norm(config, options) if name else None

        self.self_attn = self.mixer = self.mlp = None
        source = config.source_of(layer)
        for spec in config.layers_of(layer):
            if source is not None:
                self.self_attn = SharedAttention(config, options, f"{name}.self_attn", source)
            elif spec.kind == "mla" and config.indexer is not None:
                self.self_attn = SparseLatentAttention(
                    config,
                    options,
                    spec,
                    f"{name}.self_attn",
                    chooses=layer in config.indexer.layers,
                )
            elif spec.kind == "mla":
                self.self_attn = LatentAttention(config, options, spec, f"{name}.self_attn")
            elif spec.kind in KEPT_BESIDE:
                continue
            elif spec.kind in KV_KINDS:
                self.self_attn = Attention(config, options, f"{name}.self_attn", layer)
            else:
                own = share_of(spec, options.num_shards)
                self.mixer = mixer_of(spec)(config, options, own, f"{name}.mixer")
        if config.has_experts(layer):
            self.mlp = MixtureOfExperts(config, options, f"{name}.mlp")
        elif config.intermediate_size:
            deviations = dict(config.sparse_layers).get(layer)
            self.mlp = Mlp(config, options, f"{name}.mlp", config.width_of(layer), deviations)
        self.beside_mlp = self.altup = self.laurel = self.inputs = self.scale = None
        if config.has_experts_beside_mlp:
            self.beside_mlp = ExpertsBesideMlp(config, options, f"{name}.beside_mlp")
        if config.altup is not None:
            self.altup = AltUpLayer(config, options, f"{name}.altup")
            self.laurel = Laurel(config, options, f"{name}.laurel")
        if config.per_layer_inputs is not None:
            self.inputs = PerLayerInput(config, options, f"{name}.inputs", layer)
        if config.layer_scale:
            self.scale = nn.Parameter((1,), "float32")
        self.is_parallel = config.parallel_mlp
        self.before_attention = norm(config.norms.before_attention)
        self.after_attention = norm(config.norms.after_attention)
        self.before_mlp = norm(config.norms.before_mlp)
        self.after_mlp = norm(config.norms.after_mlp)

    def forward(
        self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int, step: StepRows
    ) -> nn.Tensor:
        """Run the layer, whose first layer of the cache is `layer`."""
        if self.altup is None:
            x = self._run(x, cache, layer, step)
            if self.inputs is not None:
                assert step.inputs is not None
                x = self.inputs(x, step.inputs, x, self.scale)
            return x
        predicted = self.altup.predict(x)
        computed = self._run(self.altup.active(predicted), cache, layer, step)
        x = self.altup.correct(predicted, computed)
        if self.inputs is None:
            return x
        assert step.inputs is not None
        active = self.altup.active(x, self.altup.scale)
        return self.altup.add(x, self.inputs(active, step.inputs, None, None))

    def _run(
        self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int, step: StepRows
    ) -> nn.Tensor:
        """Return the rows behind attention and the MLP."""
        beside, behind = (self.mlp, None) if self.is_parallel else (None, self.mlp)

        def attend(inner: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
            total, mixer_layer = residual, layer
            if isinstance(self.self_attn, SparseLatentAttention):
                total, step.chosen = self.self_attn(inner, total, cache, layer, step.chosen)
            elif self.self_attn is not None:
                total = self.self_attn(inner, total, cache, layer, step)
                mixer_layer = layer + 1
            if self.mixer is not None:
                total = self.mixer(inner, total, cache, mixer_layer)
            return total if beside is None else beside(inner, total)

        inner = x if self.before_attention is None else self.before_attention(x)
        x = _add(x, inner, attend, self.after_attention)
        if self.laurel is not None:
            x = self.laurel(x, inner)
        if behind is None:
            return x
        inner, rows = x if self.before_mlp is None else self.before_mlp(x), x

        def compute(inner: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
            if self.beside_mlp is None:
                return behind(inner, residual)
            return self.beside_mlp(rows, behind(inner, residual))

        scale = None if self.inputs is not None else self.scale
        return _add(x, inner, compute, self.after_mlp, scale)


def _add(
    x: nn.Tensor,
    inner: nn.Tensor,
    compute,
    after: Norm | None,
    scale: nn.Tensor | None = None,
) -> nn.Tensor:
    """Return ``(x + after(compute(inner))) * scale``; the last kernel of the chain adds x."""
    if after is None:
        assert scale is None
        return compute(inner, x)
    return after(compute(inner, None), x, scale)
