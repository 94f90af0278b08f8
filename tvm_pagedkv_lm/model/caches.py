# SPDX-License-Identifier: Apache-2.0
"""Creation of a model's caches, which share their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tvm

from tvm_pagedkv.cache import KVCache, open_prefix_cache
from tvm_pagedkv.compiler import build_libraries, config_map, load_libraries
from tvm_pagedkv.config import KVCacheConfig, LayerSpec, PrefixCacheConfig, RopeConfig

from ..blocks.mixers import share_of
from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions


class Caches:
    """Makes caches for a model, or for the layers and heads of a worker.

    Parameters
    ----------
    config : DecoderConfig
    options : BuildOptions
    """

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        self._config, self._options = config, options
        self._kernels = load_libraries(_libraries(config, options))
        self._create = tvm.get_global_func("pagedkv.create")

    def create(
        self,
        capacities: tuple[int, int, int],
        *,
        enable_kv_transfer: bool = False,
        share_prefix: bool = True,
        use_long_rope_factors: bool = False,
        prefix_cache: PrefixCacheConfig | None = None,
    ) -> KVCache:
        """Make an empty cache.

        Parameters
        ----------
        capacities : (max_num_sequences, max_total_tokens, prefill_chunk_size)
        enable_kv_transfer, share_prefix : bool
            As for `KVCacheConfig`. Batch-invariant models never share reads of a prefix.
        use_long_rope_factors : bool
            For longrope: rotate all positions by the long factors.
        prefix_cache : PrefixCacheConfig, optional
            Tiers below the pages. The name of the model gets what else K and V depend on.
        """
        config = cache_config(self._config, self._options, capacities, enable_kv_transfer)
        shares = share_prefix and not self._options.batch_invariant
        config = replace(config, share_prefix=shares)
        described = config_map(config.resolved(), self._kernels, tvm.cpu())
        if use_long_rope_factors and self._config.short_text:
            factors = config.rope.scaling_dict["long_factor"]
            both = np.array([*factors, *factors], "float32")
            described["rope_ext_factors"] = tvm.runtime.tensor(both)
        cache = self._create(described, [dict(each) for each in self._kernels.sets], tvm.cpu())
        if prefix_cache is not None:
            factors_name = (
                "long factors" if use_long_rope_factors and self._config.short_text else ""
            )
            name = f"{prefix_cache.model_id} {self._options.precision} {factors_name}".rstrip()
            open_prefix_cache(cache, replace(prefix_cache, model_id=name))
        return cache


def compile_kernels(
    config: DecoderConfig, options: BuildOptions, progress: Callable[[str], None] | None
) -> None:
    """Compile the kernels of the caches, unless they are in the disk cache."""
    _libraries(config, options, progress)


def _with_types(layer: LayerSpec, options: BuildOptions) -> LayerSpec:
    """Return a layer whose index keys or states are of the types of the options."""
    if layer.kind == "index":
        return replace(layer, kv_dtype=options.dtype)
    if layer.recurrent is not None:
        states = replace(layer.recurrent, state_dtype=options.state_dtype)
        return replace(layer, recurrent=states)
    return layer


def _in_mode(rope: RopeConfig, mode: str) -> RopeConfig:
    return rope if rope.mode == "none" else replace(rope, mode=mode)


def _libraries(config, options, progress=None):
    return build_libraries(cache_config(config, options), options.target, progress)


def cache_config(
    config: DecoderConfig,
    options: BuildOptions,
    capacities: tuple[int, int, int] = (1, 1, 1),
    enable_kv_transfer: bool = False,
) -> KVCacheConfig:
    """Return the configuration of the cache of a worker's layers and heads.

    Parameters
    ----------
    config : DecoderConfig
    options : BuildOptions
    capacities : (max_num_sequences, max_total_tokens, prefill_chunk_size)
        Kernels do not depend on them.
    enable_kv_transfer : bool
        As for `KVCacheConfig`.

    Raises
    ------
    ValueError, TypeError
        If the heads, the page size or a window have no kernels.
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
    # With a sliding window, positions change as the window moves, so K is rotated when it is read.
    mode = "inline" if options.sliding_window else "normal"
    ropes = [_in_mode(layer.rope or RopeConfig(), mode) for layer in config.cache_layers]
    shares = [share_of(each, options.num_shards) for each in config.cache_layers]
    layers = [replace(each, rope=rope) for each, rope in zip(shares, ropes, strict=True)]
    layers = [_with_types(each, options) for each in layers]
    for index, _ in options.budgets:
        at = config.cache_index(index)
        layers[at] = replace(layers[at], page_bounds=True)
    for index, scales in options.kv_scales:
        at = config.cache_index(index)
        layers[at] = replace(layers[at], kv_scales=scales)
    max_num_sequences, max_total_tokens, prefill_chunk_size = capacities
    return KVCacheConfig(
        num_layers=len(layers),
        num_qo_heads=max(config.num_heads // options.num_shards, 1),  # 0 without attention
        num_kv_heads=max(config.num_kv_heads // options.num_shards, 1),
        qk_head_dim=config.head_dim,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        page_size=options.page_size,
        max_num_sequences=max_num_sequences,
        max_total_tokens=max_total_tokens,
        prefill_chunk_size=prefill_chunk_size,
        layers=layers,
        rope=ropes[0],
        sliding_window=options.sliding_window,
        logit_softcap=config.attention_softcap,
        enable_kv_transfer=enable_kv_transfer,
        layer_indptr=[config.cache_index(i) for i in options.layer_indptr] or None,
        stage=options.stage,
    )
