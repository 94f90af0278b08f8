# SPDX-License-Identifier: Apache-2.0
"""The compiler: a configuration and a target become kernels, kept on disk, and a cache.

Everything here needs the compiler of apache-tvm. Running what was compiled does not.
"""

from .build import (
    KernelLibraries,
    KernelSets,
    build_kernels,
    build_libraries,
    kernel_spec,
    load_kernels,
    load_libraries,
)
from .cache_folder import cache_dir
from .codec_cost import warn_if_slow
from .cpu_classes import choices
from .create import codec_map, config_map, create, rope_details
from .disk_cache import cached_library, code_versions, library_file, load_library
from .lowering import KernelObjects, compile_kernel, kernel_symbol
from .progress import compiling
from .recurrent_specs import index_spec
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
    "build_kernels",
    "build_libraries",
    "architecture",
    "cache_dir",
    "cached_library",
    "choices",
    "class_of",
    "code_versions",
    "codec_map",
    "compile_kernel",
    "compiling",
    "config_map",
    "create",
    "index_spec",
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
    "rope_details",
    "scratch_bytes",
    "vector_target",
    "warn_if_slow",
]
