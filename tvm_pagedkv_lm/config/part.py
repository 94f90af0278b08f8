# SPDX-License-Identifier: Apache-2.0
"""`LayerPart`: a block of a layer as a value, from which its code and its weights follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tir_kernels.codec import Codec, CodecPair
from tvm_pagedkv.config import LayerSpec

from .expert_config import Experts
from .index_config import IndexConfig

if TYPE_CHECKING:
    from .decoder_config import DecoderConfig
    from .options import BuildOptions

NOT_SHARED = (
    "layers that attend to the K and V of others, have heads of their own widths or per-layer "
    "embeddings (Gemma 3n and 4)"
)


class LayerPart:
    """A block of a layer.

    The parts of a model are frozen dataclasses in `blocks`, each beside the module that it builds.
    What a family has that others do not is a part of its own, or a field of one.

    Attributes
    ----------
    is_connected : bool
        Whether it needs more of a step than the rows of the layer before it, and so all layers in
        one process.
    """

    is_connected: bool = False

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the cache that belong to it."""
        return ()

    @property
    def whole_because(self) -> str | None:
        """Why several workers cannot share its layer; None: they can."""
        return f"workers do not share {NOT_SHARED}" if self.is_connected else None

    @property
    def shared_counts(self) -> dict[str, int]:
        """What workers that share its layer divide, such as "num_heads"."""
        return {}

    @property
    def routed(self) -> Experts | None:
        """The experts of which each row takes some, if it has any."""
        return None

    def build(self, config: DecoderConfig, options: BuildOptions, name: str, layer: int) -> Any:
        """Return the module of this part in a layer of the model.

        Parameters
        ----------
        config : DecoderConfig
        options : BuildOptions
        name : str
            Name of the module, by which `BuildOptions` knows the formats of its weights.
        layer : int
        """
        raise NotImplementedError

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and the `Weight` of every parameter of the module.

        Parameters
        ----------
        config : DecoderConfig
        ours : str
            Name of the module.
        theirs : str
            What the tensors of the layer begin with in checkpoints.
        """
        raise NotImplementedError

    def is_unused(self, tensor: str) -> bool:
        """Whether checkpoints may have this tensor of the layer though nothing reads it."""
        return False

    def without_cache(self) -> LayerPart:
        """Return the part with defaults for what the cache alone does with K and V."""
        return self


class AttentionPart(LayerPart):
    """A part that attends to rows of the cache.

    Attributes
    ----------
    index : IndexConfig, optional
        What chooses the positions, or their blocks, that rows attend to.
    """

    index: IndexConfig | None = None

    @property
    def pages(self) -> LayerSpec:
        """The layer of the cache whose pages it reads."""
        raise NotImplementedError

    @property
    def product_width(self) -> int:
        """Half the features of K and V, of all heads, that a row multiplies with a position."""
        raise NotImplementedError

    def position_bytes(self, itemsize: int, codec: Codec | CodecPair | None) -> int:
        """Return the bytes of a position in the pages."""
        raise NotImplementedError

    @property
    def chooses_positions(self) -> bool:
        """Whether it needs no choice of positions by an earlier layer."""
        return self.index is None or self.index.chooses or self.index.blocks is not None

    @property
    def most_positions(self) -> int | None:
        """How many positions a row attends to at most; None: all."""
        if self.index is not None and self.pages.lists:
            return self.index.num_positions
        return self.pages.window
