# SPDX-License-Identifier: Apache-2.0
"""`BlockIndexer`: the indexer of MiniMax M3, which chooses blocks of positions for each KV head.

Its keys lie in an index lane of the cache, a layer of its own behind that of attention.
"""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.index_config import IndexConfig
from ..config.options import BuildOptions
from ..kernels.rows import norms
from ..weights.weight_parts import Output, Weights, rows, vector
from .heads import Heads
from .projections import Linear


class BlockIndexer(nn.Module):
    """Index heads and a key, each with a norm and a rotation, and the choice by the cache."""

    def __init__(self, shape: IndexConfig, config: DecoderConfig, options: BuildOptions, name: str):
        assert shape.blocks is not None
        self.shape, self.blocks = shape, shape.blocks
        if self.blocks.size % options.page_size:
            raise ValueError(
                f"page_size must divide the blocks of {self.blocks.size} positions that the model "
                f"chooses, got {options.page_size}"
            )
        self.options, self.epsilon = options, config.norm_eps
        dim = self.shape.dim
        self.qk_proj = Linear(
            config.hidden_size, (self.shape.num_heads + 1) * dim, options, name=f"{name}.qk_proj"
        )
        self.q_weight, self.k_weight = (nn.Parameter((dim,), "float32") for _ in range(2))
        self.heads = Heads(dim, shape.rope, options)

    def forward(self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int) -> nn.Tensor:
        """Append the keys of this step to an index lane, and return what each row chooses."""
        shape, options = self.shape, self.options
        q, k = (shape.num_heads, shape.dim), (1, shape.dim)
        kernel = norms.qk_norm(q, k, 0, self.epsilon, options.dtype, options.vector)
        qk = self.qk_proj(x)
        qk = op.tensor_ir_op(kernel, "qk_norm", [qk, self.q_weight, self.k_weight], qk)
        queries = self.heads.take(qk, 0, shape.num_heads, cache)
        keys = self.heads.take(qk, shape.num_heads, 1, cache)
        cache = cache.append_index(layer, keys)
        queries = op.reshape(queries, (x.shape[0], shape.num_heads, shape.dim))
        size, init, local = self.blocks.size, self.blocks.num_first, self.blocks.num_last
        return cache.index_top_blocks(layer, queries, shape.num_chosen, size, init, local)


def block_indexer_weights(
    shape: IndexConfig, config: DecoderConfig, ours: str, theirs: str, prefix: str
) -> Weights:
    """Yield the name and the source of every weight of an indexer of an attention layer.

    Names of its tensors begin with `prefix` below `theirs`, the attention.
    """
    outputs = [
        Output(f"{prefix}q_proj", shape.num_heads * shape.dim),
        Output(f"{prefix}k_proj", shape.dim),
    ]
    yield from rows(f"{ours}.qk_proj", theirs, outputs, config.hidden_size)
    for name in "qk":
        tensor = f"{theirs}.{prefix}{name}_norm.weight"
        yield vector(f"{ours}.{name}_weight", tensor, shape.dim, offset=config.norm_offset)
