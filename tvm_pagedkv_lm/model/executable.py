# SPDX-License-Identifier: Apache-2.0
"""The compiled functions of a model, kept in the disk cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tvm

import tir_kernels
import tvm_pagedkv.compiler
from tvm_pagedkv.compiler import code_versions, compiling, library_file

from ..blocks.decoder import build_module
from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from .caches import compile_kernels

# The files that decide the code of a model; the kernels of its caches are compiled by themselves.
_SOURCES = (
    Path(__file__).parents[1],
    Path(tir_kernels.__file__).parent,
    Path(tvm_pagedkv.compiler.__file__).parent / "build.py",
)


def executable_file(
    config: DecoderConfig, options: BuildOptions, progress: Callable[[str], None] | None = None
) -> Path:
    """Return the library with the compiled functions of the model, or of one of its stages."""

    def compile_model():
        num_layers = len(options.layers_of(config))
        with compiling(f"the model ({num_layers} layers, {options.dtype})", progress):
            return tvm.compile(build_module(config, options), options.target)

    compile_kernels(config, options, progress)
    versions = code_versions(*_SOURCES)
    key = [
        repr(config.without_cache()),
        repr(replace(options, kv_dtype=None, state_dtype="float32", kv_scales=())),
        *versions,
    ]
    return library_file(key, compile_model)
