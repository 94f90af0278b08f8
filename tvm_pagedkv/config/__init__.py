# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of a cache: its layers, its rotary embedding, its size.

Programs with options of their own check them with the same functions, and raise the same errors.
"""

from .._checks import check_choice, check_int, check_positive
from .alibi import standard_slopes
from .cache_config import KVCacheConfig
from .dtypes import DTYPES, ITEMSIZE, KV_DTYPES
from .layer_spec import (
    ATTENTION_KINDS,
    KV_KINDS,
    LAYER_KINDS,
    MHA_KINDS,
    WINDOW_KINDS,
    LayerSpec,
)
from .prefix_cache_config import WRITE_POLICIES, PrefixCacheConfig
from .recurrent_config import CONV_ACTIVATIONS, RECURRENT_RULES, ConvConfig, RecurrentConfig
from .resolved_config import POPPABLE, ResolvedConfig
from .resolved_layer import ResolvedLayer
from .rope_config import ROPE_MODES, ROPE_TYPES, RopeConfig

__all__ = [
    "ATTENTION_KINDS",
    "CONV_ACTIVATIONS",
    "DTYPES",
    "ITEMSIZE",
    "KV_DTYPES",
    "KV_KINDS",
    "LAYER_KINDS",
    "MHA_KINDS",
    "POPPABLE",
    "RECURRENT_RULES",
    "ROPE_MODES",
    "ROPE_TYPES",
    "WINDOW_KINDS",
    "WRITE_POLICIES",
    "ConvConfig",
    "KVCacheConfig",
    "LayerSpec",
    "PrefixCacheConfig",
    "RecurrentConfig",
    "ResolvedConfig",
    "ResolvedLayer",
    "RopeConfig",
    "check_choice",
    "check_int",
    "check_positive",
    "standard_slopes",
]
