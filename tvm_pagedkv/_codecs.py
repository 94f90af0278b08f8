# SPDX-License-Identifier: Apache-2.0
"""The codecs of quantized pages, from `tir_kernels.codec`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tir_kernels.codec import Codec, CodecPair


def _codec_module() -> ModuleType:
    """Import `tir_kernels.codec` alone: the package around it needs the compiler of apache-tvm."""
    name = "tir_kernels.codec"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("tir_kernels")
    if package is None or not package.submodule_search_locations:
        raise ImportError("tvm_pagedkv was installed without its package tir_kernels")
    file = Path(package.submodule_search_locations[0]) / "codec.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # `tir_kernels` finds the same classes when it is imported
    spec.loader.exec_module(module)
    return module


_codecs = _codec_module()
CODECS: dict[str, Codec] = _codecs.CODECS
KEY_CODECS: tuple[str, ...] = _codecs.KEY_CODECS
codec_of: Callable[[str], Codec | CodecPair | None] = _codecs.codec_of
