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
    """Index heads, and the layers that have them.

    Where they choose positions, the other layers attend to what the last one chose; where they
    choose blocks, the other layers attend to all positions.

    Parameters
    ----------
    num_heads, dim : int
        Number of index heads, and the width of their keys.
    num_chosen : int
        Number of positions, or of blocks, that a row attends to at most.
    is_interleaved : bool
        Whether the checkpoint's rotation of index heads pairs adjacent features. Loading permutes
        them.
    layers : tuple of int
        Layers of the model that choose.
    blocks : Blocks, optional
        None: positions are chosen, for all heads of a row.
    rope : RopeConfig, optional
        The rotation, where blocks are chosen; otherwise that of latent attention.
    """

    num_heads: int
    dim: int
    num_chosen: int
    is_interleaved: bool
    layers: tuple[int, ...]
    blocks: Blocks | None = None
    rope: RopeConfig | None = None

    @property
    def num_positions(self) -> int:
        """Number of positions that a row attends to at most."""
        return self.num_chosen * (1 if self.blocks is None else self.blocks.size)

    def layer(self, index: int) -> LayerSpec:
        """Return what the cache keeps for a layer of the model beside its rows of K and V."""
        if index not in self.layers:
            return LayerSpec("linear")
        return LayerSpec("index", num_qo_heads=self.num_heads, qk_head_dim=self.dim, rope=self.rope)

    def check_stages(self, layer_indptr: tuple[int, ...]) -> None:
        """Raise a ValueError if a stage begins with a layer that needs the choice of another."""
        for begin in layer_indptr[:-1]:
            if self.blocks is None and begin not in self.layers:
                chooses = max(layer for layer in self.layers if layer < begin)
                raise ValueError(
                    f"a stage may not begin with layer {begin}, which attends to the positions "
                    f"that layer {chooses} has chosen; layers that choose: {list(self.layers)}"
                )
