# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache for language models built with Apache TVM."""

from __future__ import annotations

from typing import Any

from . import _library

_library.load()

import tvm_ffi  # noqa: E402

from ._errors import CacheFullError  # noqa: E402
from ._library import path as library_path  # noqa: E402
from ._version import __version__  # noqa: E402
from .bundle import Bundle, load_bundle  # noqa: E402
from .cache import KVCache, open_prefix_cache  # noqa: E402
from .config import (  # noqa: E402
    ConvConfig,
    KVCacheConfig,
    LayerSpec,
    PrefixCacheConfig,
    RecurrentConfig,
    RopeConfig,
)
from .threads import available_cpus, num_threads, set_num_threads  # noqa: E402

if _library.has_compiler():
    from .bundle import write_bundle  # noqa: E402
    from .compiler import build_kernels as build  # noqa: E402
    from .compiler import create, native_target, scratch_bytes  # noqa: E402
    from .relax import PagedKVCache, PagedKVCacheObject  # noqa: E402


def use_stock_runtime() -> None:
    """Let ``vm.builtin.paged_attention_kv_cache_create`` make the cache inside apache-tvm."""
    tvm_ffi.get_global_func("pagedkv.use_stock_runtime")()


def use_pagedkv_runtime() -> None:
    """Let ``vm.builtin.paged_attention_kv_cache_create`` make our cache again (the default)."""
    tvm_ffi.get_global_func("pagedkv.use_pagedkv_runtime")()


def __getattr__(name: str) -> Any:
    if name in __all__ and not _library.has_compiler():
        raise ImportError(
            f"tvm_pagedkv.{name} needs the compiler of apache-tvm (libtvm_compiler.so), which is "
            "not installed; load_bundle works without it"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "__version__",
    "Bundle",
    "CacheFullError",
    "ConvConfig",
    "KVCache",
    "KVCacheConfig",
    "LayerSpec",
    "PagedKVCache",
    "PagedKVCacheObject",
    "PrefixCacheConfig",
    "RecurrentConfig",
    "RopeConfig",
    "available_cpus",
    "build",
    "create",
    "library_path",
    "load_bundle",
    "native_target",
    "num_threads",
    "open_prefix_cache",
    "scratch_bytes",
    "set_num_threads",
    "use_pagedkv_runtime",
    "use_stock_runtime",
    "write_bundle",
]
