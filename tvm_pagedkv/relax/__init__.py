# SPDX-License-Identifier: Apache-2.0
"""The cache in models written with ``tvm.relax.frontend.nn``."""

from .frontend import PagedKVCache
from .frontend_methods import PagedKVCacheObject

__all__ = ["PagedKVCache", "PagedKVCacheObject"]
