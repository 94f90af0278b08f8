# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of a cache: its layers, its rotary embedding, its size."""

from .cache_config import POPPABLE, KVCacheConfig, LayerSpec
from .rope_config import RopeConfig

__all__ = ["POPPABLE", "KVCacheConfig", "LayerSpec", "RopeConfig"]
