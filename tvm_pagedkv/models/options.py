# SPDX-License-Identifier: Apache-2.0
"""What the code of a model depends on besides its configuration, and the cache for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.target import Target

from tir_kernels.spec import VectorTarget

from ..build import vector_target
from ..config import KVCacheConfig, LayerSpec
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

    @property
    def vector(self) -> VectorTarget:
        """SIMD traits of the target."""
        return vector_target(self.target)

    def layers_of(self, config: DecoderConfig) -> range:
        """The layers of the stage."""
        indptr = self.layer_indptr or (0, config.num_layers)
        return range(*indptr[self.stage : self.stage + 2])

    @property
    def is_first(self) -> bool:
        """Whether the stage takes tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives logits."""
        return self.stage + 2 >= len(self.layer_indptr)


def cache_config(
    config: DecoderConfig,
    options: BuildOptions,
    capacities: tuple[int, int, int] = (1, 1, 1),
    *,
    enable_kv_transfer: bool = False,
    long_texts: bool = False,
) -> KVCacheConfig:
    """The cache of a worker's layers and heads.

    Parameters
    ----------
    capacities : (max_num_sequences, max_total_tokens, prefill_chunk_size)
        The kernels do not depend on them.
    enable_kv_transfer : bool
        As that of `KVCacheConfig`.
    long_texts : bool
        longrope: rotate all positions by the factors for texts beyond the original length.

    Raises
    ------
    ValueError, TypeError
        For heads, page sizes and windows that have no kernels.
    """
    if config.longest_text and options.sliding_window:
        raise ValueError(
            "its dynamic rotation changes with the length of a text; it cannot run with a "
            "sliding window"
        )
    if config.short_text and options.sliding_window:
        raise ValueError(
            "its longrope rotation has factors that change with the length of a text; it cannot "
            "run with a sliding window"
        )
    layers = [_layer(layer, options.sliding_window, long_texts) for layer in config.layers]
    max_num_sequences, max_total_tokens, prefill_chunk_size = capacities
    return KVCacheConfig(
        num_layers=config.num_layers,
        num_qo_heads=config.num_heads // options.num_shards,
        num_kv_heads=config.num_kv_heads // options.num_shards,
        qk_head_dim=config.head_dim,
        dtype=options.dtype,
        page_size=options.page_size,
        max_num_sequences=max_num_sequences,
        max_total_tokens=max_total_tokens,
        prefill_chunk_size=prefill_chunk_size,
        layers=layers,
        rope=layers[0].rope,
        sliding_window=options.sliding_window,
        logit_softcap=config.attention_softcap,
        enable_kv_transfer=enable_kv_transfer,
        layer_indptr=options.layer_indptr or None,
        stage=options.stage,
    )


def _layer(layer: LayerSpec, has_windows: bool, long_texts: bool) -> LayerSpec:
    # What is in a sequence's window moves with it, so it is rotated when it is read.
    mode = "inline" if has_windows else "normal"
    scaling = layer.rope.scaling_dict
    if long_texts and scaling.get("rope_type") == "longrope":
        scaling["short_factor"] = scaling["long_factor"]
    return replace(layer, rope=replace(layer.rope, mode=mode, scaling=scaling))
