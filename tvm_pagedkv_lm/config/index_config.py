# SPDX-License-Identifier: Apache-2.0
"""`IndexConfig`: the indexer that chooses the positions which rows attend to."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_pagedkv.config import LayerSpec, RopeConfig


@dataclass(frozen=True)
class Blocks:
    """Blocks of positions, for models whose indexers choose these.

    Parameters
    ----------
    size : int
        Positions of a block.
    num_first, num_last : int
        The first blocks, and the last ones up to the row's own, that are always chosen.
    """

    size: int
    num_first: int
    num_last: int


@dataclass(frozen=True)
class IndexConfig:
    """The index heads of a layer, or those whose choice it shares.

    Parameters
    ----------
    num_heads, dim : int
        Number of index heads, and the width of their keys.
    num_chosen : int
        Number of positions, or of blocks, that a row attends to at most.
    is_interleaved : bool
        Whether the checkpoint's rotation of index heads pairs adjacent features. Loading permutes
        them.
    chooses : bool
        Whether the layer has the heads. Otherwise it attends to the positions that the last layer
        with heads chose, or, where blocks are chosen, to all positions.
    blocks : Blocks, optional
        None: positions are chosen, for all heads of a row.
    rope : RopeConfig, optional
        The rotation, where blocks are chosen; otherwise that of latent attention.
    """

    num_heads: int
    dim: int
    num_chosen: int
    is_interleaved: bool
    chooses: bool = True
    blocks: Blocks | None = None
    rope: RopeConfig | None = None

    @property
    def num_positions(self) -> int:
        """Number of positions that a row attends to at most."""
        return self.num_chosen * (1 if self.blocks is None else self.blocks.size)

    @property
    def cache_layer(self) -> LayerSpec:
        """What the cache keeps beside the rows of K and V."""
        if not self.chooses:
            return LayerSpec("linear")
        return LayerSpec("index", num_qo_heads=self.num_heads, qk_head_dim=self.dim, rope=self.rope)
