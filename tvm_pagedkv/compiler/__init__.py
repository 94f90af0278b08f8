# SPDX-License-Identifier: Apache-2.0
"""The compiler: a configuration and a target become kernels, kept on disk, and a cache.

Everything here needs the compiler of apache-tvm. Running what was compiled does not.
"""

from .build import (
    KernelLibraries,
    KernelSets,
    SpecSets,
    build_kernels,
    build_libraries,
    kernel_spec,
    load_kernels,
    load_libraries,
    spec_sets,
)
from .cache_folder import cache_dir
from .codec_cost import warn_if_slow
from .cpu_classes import choices
from .create import config_map, create
from .disk_cache import cached_library, code_versions, library_file, load_library
from .lowering import KernelObjects, compile_kernel, kernel_symbol
from .plain_tir import for_relax
from .progress import compiling
from .scratch import scratch_bytes
from .targets import (
    architecture,
    class_of,
    is_cuda,
    native_target,
    require_cpu,
    required_features,
    resolve_target,
    vector_target,
)

__all__ = [
    "KernelLibraries",
    "KernelObjects",
    "KernelSets",
    "SpecSets",
    "build_kernels",
    "build_libraries",
    "architecture",
    "cache_dir",
    "cached_library",
    "choices",
    "class_of",
    "code_versions",
    "compile_kernel",
    "compiling",
    "config_map",
    "create",
    "for_relax",
    "is_cuda",
    "kernel_spec",
    "kernel_symbol",
    "library_file",
    "load_kernels",
    "load_libraries",
    "load_library",
    "native_target",
    "require_cpu",
    "required_features",
    "resolve_target",
    "scratch_bytes",
    "spec_sets",
    "vector_target",
    "warn_if_slow",
]
