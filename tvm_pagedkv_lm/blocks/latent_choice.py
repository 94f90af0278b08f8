# SPDX-License-Identifier: Apache-2.0
"""`SparseLatentAttention`: latent attention of rows to positions that an indexer chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import LayerSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.index_config import IndexConfig
from ..config.options import BuildOptions
from ..weights.weight_parts import Weights
from .indexer import Indexer, indexer_weights
from .latent import BLOCK, LatentAttention, LatentProjections, projection_weights
from .step_rows import StepRows


@dataclass(frozen=True)
class SparseLatentAttention(LatentAttention):
    """Absorbed attention to chosen positions, the rows of this step among them.

    A layer with an indexer chooses for itself and the layers after it that have none.

    Parameters
    ----------
    index : IndexConfig
    """

    index: IndexConfig = field(kw_only=True)

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        return self.spec, self.index.cache_layer

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> LatentProjections:
        return SparseLatentAttentionBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{BLOCK}"
        yield from projection_weights(self, config, ours, theirs)
        if self.index.chooses:
            both = f"{ours}.indexer", f"{theirs}.indexer"
            yield from indexer_weights(self.index, self.shape, config, *both)


class SparseLatentAttentionBlock(LatentProjections):
    """The projections around attention to chosen positions, and the indexer."""

    def __init__(
        self, part: SparseLatentAttention, config: DecoderConfig, options: BuildOptions, name: str
    ):
        super().__init__(part, config, options, name)
        self.indexer = None
        if part.index.chooses:
            assert self.rope is not None, "keys of an indexer are rotated"
            shapes = part.index, part.shape
            self.indexer = Indexer(*shapes, config, options, self.rope, f"{name}.indexer")

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        step: StepRows,
    ) -> nn.Tensor:
        n, shape, heads = x.shape[0], self.shape, self.num_heads
        positions, compressed_q = cache.get_query_positions(n), self.compress_q(x)
        if self.indexer is not None:
            step.chosen = self.indexer(x, compressed_q, positions, cache, layer + 1)
        assert step.chosen is not None, "the first layer of a stage chooses"
        _, latent = self.rows(self.kv_down(x), positions)
        _, q = self.queries(compressed_q, positions)
        cache = cache.append_mla_kv(layer, op.reshape(latent, (1, n, 1, shape.width)))
        out, _ = cache.cross_attention_to_positions(layer, q, step.chosen, shape.rank, self.scale)
        out = self.v_up.of_each(op.reshape(out, (n * heads, shape.rank)))
        return self.o_proj(op.reshape(out, (n, heads * shape.v_dim)), residual)
