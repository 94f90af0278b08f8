# SPDX-License-Identifier: Apache-2.0
"""`BuildOptions`: what a model's code depends on besides its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tir_kernels.spec import VectorTarget

from ..compiler import vector_target
from .config import DecoderConfig


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

    @property
    def vector(self) -> VectorTarget:
        """SIMD traits of the target."""
        return vector_target(self.target)

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
