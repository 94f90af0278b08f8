# SPDX-License-Identifier: Apache-2.0
"""`SparseLatentAttention`: latent attention of rows to positions that an indexer chooses."""

from __future__ import annotations

from collections.abc import Iterator

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import LayerSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..weights.weight_parts import Weight
from .indexer import Indexer, indexer_weights
from .latent import LatentProjections, projection_weights


class SparseLatentAttention(LatentProjections):
    """Absorbed attention to chosen positions, the rows of this step among them.

    A layer with an indexer chooses for itself and the layers behind it that have none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: BuildOptions,
        layer: LayerSpec,
        name: str,
        *,
        chooses: bool,
    ):
        super().__init__(config, options, layer, name)
        self.indexer = None
        if chooses:
            assert self.rope is not None, "keys of an indexer are rotated"
            self.indexer = Indexer(config, options, self.rope, f"{name}.indexer")

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        chosen: nn.Tensor | None,
    ) -> tuple[nn.Tensor, nn.Tensor]:
        """Return the rows, and the positions that they attended to."""
        n, shape, heads = x.shape[0], self.shape, self.num_heads
        positions, compressed_q = cache.get_query_positions(n), self.compress_q(x)
        if self.indexer is not None:
            chosen = self.indexer(x, compressed_q, positions, cache, layer + 1)
        assert chosen is not None, "the first layer of a stage chooses"
        _, latent = self.rows(self.kv_down(x), positions)
        _, q = self.queries(compressed_q, positions)
        cache = cache.append_mla_kv(layer, op.reshape(latent, (1, n, 1, shape.width)))
        out, _ = cache.cross_attention_to_positions(layer, q, chosen, shape.rank, self.scale)
        out = self.v_up.of_each(op.reshape(out, (n * heads, shape.rank)))
        return self.o_proj(op.reshape(out, (n, heads * shape.v_dim)), residual), chosen


def sparse_latent_weights(
    config: DecoderConfig, ours: str, theirs: str, *, chooses: bool
) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of `SparseLatentAttention`."""
    yield from projection_weights(config, ours, theirs)
    if chooses:
        yield from indexer_weights(config, f"{ours}.indexer", f"{theirs}.indexer")
