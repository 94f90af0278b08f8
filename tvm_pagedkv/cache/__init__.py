# SPDX-License-Identifier: Apache-2.0
"""The cache: the runtime object with keywords, its creation, checkpoints and page maps."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
