# SPDX-License-Identifier: Apache-2.0
"""`BuildOptions`: what a model's code depends on besides its configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tvm.target import Target

from tir_kernels.spec import VectorTarget

from ..compiler import vector_target
from .config import DecoderConfig
from .weight_formats import FORMATS, WeightFormat


@dataclass(frozen=True)
class BuildOptions:
    """What the code of a model depends on besides its configuration."""

    dtype: str
    page_size: int
    target: Target
    sliding_window: bool = False  # whether sequences of its caches may have a window
    num_shards: int = 1  # workers that share the heads and the MLP of every layer
    layer_indptr: tuple[int, ...] = ()  # of pipeline stages, as `KVCacheConfig` has it; (): one
    stage: int = 0
    kv_dtype: str | None = None  # of the pages of its caches; None: dtype
    formats: tuple[tuple[str, str], ...] = ()  # name of each quantized weight, and its format

    @property
    def vector(self) -> VectorTarget:
        """SIMD traits of the target."""
        return vector_target(self.target)

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of a weight; None: its numbers are of type `dtype`."""
        format = dict(self.formats).get(name)
        return None if format is None else FORMATS[format]

    @property
    def precision(self) -> str:
        """Return a name for the types of weights and activations, on which K and V depend."""
        if not self.formats:
            return self.dtype
        return f"{self.dtype} {hashlib.sha256(repr(self.formats).encode()).hexdigest()[:16]}"

    def layers_of(self, config: DecoderConfig) -> range:
        """Return the layers of the stage."""
        indptr = self.layer_indptr or (0, config.num_layers)
        return range(*indptr[self.stage : self.stage + 2])

    @property
    def is_first(self) -> bool:
        """Whether the stage has the token embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage + 2 >= len(self.layer_indptr)
