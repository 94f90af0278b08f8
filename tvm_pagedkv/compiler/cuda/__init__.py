# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs: from PrimFuncs to CUDA C++, device code, libraries and object files."""

from .build import cuda_spec
from .library import DeviceCode, check_archs, compile_ptx, cuda_version, device_code, find_nvcc
from .objects import CudaKernelObjects, arch_of, cuda_kernel_symbol
from .source import cuda_source

__all__ = [
    "CudaKernelObjects",
    "DeviceCode",
    "arch_of",
    "check_archs",
    "compile_ptx",
    "cuda_kernel_symbol",
    "cuda_source",
    "cuda_spec",
    "cuda_version",
    "device_code",
    "find_nvcc",
]
