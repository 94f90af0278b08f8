# SPDX-License-Identifier: Apache-2.0
"""`IndexConfig`: the indexer that chooses the positions which rows attend to."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LayerSpec


@dataclass(frozen=True)
class IndexConfig:
    """Index heads, and the layers that have them. The others attend to what the last one chose.

    Parameters
    ----------
    num_heads, dim : int
        Number of index heads, and the width of their keys.
    num_chosen : int
        Number of positions that a row attends to at most.
    is_interleaved : bool
        Whether the checkpoint's rotation of index heads pairs adjacent features. Loading permutes
        them.
    layers : tuple of int
        Layers of the model that choose.
    """

    num_heads: int
    dim: int
    num_chosen: int
    is_interleaved: bool
    layers: tuple[int, ...]

    def layer(self, index: int) -> LayerSpec:
        """Return what the cache keeps for a layer of the model beside its latent rows."""
        if index not in self.layers:
            return LayerSpec("linear")
        return LayerSpec("index", num_qo_heads=self.num_heads, qk_head_dim=self.dim)

    def check_stages(self, layer_indptr: tuple[int, ...]) -> None:
        """Raise a ValueError if a pipeline stage begins with a layer that does not choose."""
        for begin in layer_indptr[:-1]:
            if begin not in self.layers:
                chooses = max(layer for layer in self.layers if layer < begin)
                raise ValueError(
                    f"a stage may not begin with layer {begin}, which attends to the positions "
                    f"that layer {chooses} has chosen; layers that choose: {list(self.layers)}"
                )
