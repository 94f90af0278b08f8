# SPDX-License-Identifier: Apache-2.0
"""`Indexer`: the lightning indexer of DeepSeek V3.2, which chooses what rows attend to.

Its keys lie in an index lane of the cache, a layer of its own behind that of attention.
"""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.index_config import IndexConfig
from ..config.latent_config import Latent
from ..config.options import BuildOptions
from ..kernels.rows.index_kernels import index_keys, index_queries
from ..weights.weight_parts import Output, Part, Weight, Weights, rows
from .projections import Linear

NORM_EPSILON = 1e-6


class Indexer(nn.Module):
    """The projections of keys, index heads and their weights, and the choice by the cache."""

    def __init__(
        self,
        shape: IndexConfig,
        latent: Latent,
        config: DecoderConfig,
        options: BuildOptions,
        rope: RopeSpec,
        name: str,
    ):
        hidden = config.hidden_size
        self.shape, self.rope, self.options = shape, rope, options
        q_width = latent.q_rank or hidden
        self.keys = Linear(hidden, shape.dim, options, name=f"{name}.keys")
        self.queries = Linear(q_width, shape.num_heads * shape.dim, options, name=f"{name}.queries")
        self.head_weights = Linear(
            hidden, shape.num_heads, options, out_dtype="float32", name=f"{name}.head_weights"
        )
        self.norm_weight = nn.Parameter((shape.dim,), "float32")
        self.norm_bias = nn.Parameter((shape.dim,), "float32")

    def forward(
        self,
        x: nn.Tensor,
        compressed_q: nn.Tensor,
        positions: nn.Tensor,
        cache: PagedKVCacheObject,
        layer: int,
    ) -> nn.Tensor:
        """Append the keys of this step to an index lane, and return what each row chooses."""
        n, shape, options = x.shape[0], self.shape, self.options
        kernel = index_keys(shape.dim, NORM_EPSILON, self.rope, options.dtype, options.vector)
        keys = nn.Tensor.placeholder((n, shape.dim), options.dtype)
        inputs = [self.keys(x), self.norm_weight, self.norm_bias, positions]
        keys = op.tensor_ir_op(kernel, "index_keys", inputs, keys)
        kernel = index_queries(shape.num_heads, shape.dim, self.rope, options.dtype, options.vector)
        q = nn.Tensor.placeholder((n, shape.num_heads, shape.dim), options.dtype)
        q = op.tensor_ir_op(kernel, "index_queries", [self.queries(compressed_q), positions], q)
        cache = cache.append_index(layer, keys)
        # The weights' own factor, num_heads ** -0.5, is in the scale: neither changes the order.
        scale = (shape.dim * shape.num_heads) ** -0.5
        return cache.index_top_k(layer, q, self.head_weights(x), shape.num_chosen, scale)


def indexer_weights(
    shape: IndexConfig, latent: Latent, config: DecoderConfig, ours: str, theirs: str
) -> Weights:
    """Yield the name and the source of every weight of an indexer."""
    hidden, rotated, heads = config.hidden_size, latent.rope_dim, shape.num_heads
    paired = rotated if shape.is_interleaved else 0
    begins = [(0, rotated, paired), (rotated, shape.dim, 0)]
    begins = [each for each in begins if each[0] < each[1]]

    def outputs(name: str, count: int) -> list[Output]:
        return [
            Output(name, count * (end - begin), begin, shape.dim, count, paired=pairs)
            for begin, end, pairs in begins
        ]

    yield from rows(f"{ours}.keys", theirs, outputs("wk", 1), hidden)
    q_width = latent.q_rank or hidden
    yield from rows(f"{ours}.queries", theirs, outputs("wq_b", heads), q_width)
    yield from rows(f"{ours}.head_weights", theirs, [Output("weights_proj", heads)], hidden)
    for kind in ("weight", "bias"):
        parts = tuple(
            Part(f"{theirs}.k_norm.{kind}", (shape.dim,), (begin, end), paired=pairs)
            for begin, end, pairs in begins
        )
        yield f"{ours}.norm_{kind}", Weight(parts, False)
