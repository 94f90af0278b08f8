# SPDX-License-Identifier: Apache-2.0
"""Families of GPUs: which architectures have kernels of their own, and one library for all.

A family is a `CudaTarget`. Its kernels are one translation unit, compiled apart from those of other
families, because an instruction such as ``wgmma`` exists for "sm_90a" only. Where a library holds
several families, a function of each kernel's name looks at the GPU of the call and calls the
kernel of its family.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tvm import tirx

from tir_kernels.spec import CudaTarget

from .library import check_archs, compile_library, compile_object, link_objects
from .source import cuda_source

# Architecture, as nvcc names it without "sm_" -> the target of its kernels. All others have those
# of `CudaTarget()`. Instructions of one chip need the "a", as in "90a".
FAMILIES = {"90a": CudaTarget("sm_90a")}

_DISPATCH = """
#include <cuda_runtime.h>
#include <tvm/ffi/c_api.h>
namespace {
// The compute capability of the GPU that holds the first argument, such as 90; else 0.
int ComputeCapability(const TVMFFIAny* arguments, int count) {
  if (count == 0) return 0;
  const DLTensor* tensor = nullptr;
  if (arguments[0].type_index == kTVMFFIDLTensorPtr) {
    tensor = static_cast<const DLTensor*>(arguments[0].v_ptr);
  } else if (arguments[0].type_index == kTVMFFITensor) {
    tensor = TVMFFITensorGetDLTensorPtr(arguments[0].v_obj);
  }
  if (tensor == nullptr || tensor->device.device_type != kDLCUDA) return 0;
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, tensor->device.device_id);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, tensor->device.device_id);
  return 10 * major + minor;
}
}  // namespace
using Kernel = int(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
"""


def family_of(arch: str) -> CudaTarget:
    """Return the target whose kernels an architecture runs.

    Parameters
    ----------
    arch : str
        A compute capability, such as "90" or "90a".
    """
    return FAMILIES.get(arch, CudaTarget())


def by_family(archs: Sequence[str]) -> dict[CudaTarget, tuple[str, ...]]:
    """Group architectures by the target of their kernels."""
    grouped: dict[CudaTarget, tuple[str, ...]] = {}
    for arch in archs:
        family = family_of(arch)
        grouped[family] = (*grouped.get(family, ()), arch)
    return grouped


def compile_families(
    build: Callable[[str, CudaTarget], tirx.PrimFunc],
    symbols: Mapping[str, str],
    path: Path,
    archs: Sequence[str],
) -> None:
    """Compile kernels to one library for architectures of any families.

    Parameters
    ----------
    build : callable
        Name of a kernel and a target -> the kernel.
    symbols : mapping
        Name of a kernel -> symbol.
    path : Path
        The library to write.
    archs : sequence of str
        As for `library.compile_library`.

    Raises
    ------
    ValueError, RuntimeError
        As `library.compile_library`.
    """
    check_archs(archs)
    grouped = by_family(archs)

    def source_of(family: CudaTarget, suffix: str = "") -> str:
        return cuda_source({f"{s}{suffix}": build(name, family) for name, s in symbols.items()})

    if len(grouped) == 1:
        (family,) = grouped
        compile_library(source_of(family), path, archs)
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = [source_of(family, f"_{family.family}") for family in grouped]
        objects = [Path(folder, f"{family.family}.o") for family in grouped]
        with ThreadPoolExecutor() as pool:  # each runs nvcc
            list(pool.map(compile_object, sources, objects, grouped.values()))
        link_objects(objects, _dispatch(list(symbols.values()), list(grouped)), path, archs)


def _dispatch(symbols: Sequence[str], families: Sequence[CudaTarget]) -> str:
    """Generate the functions that choose a family."""
    usual = CudaTarget() if CudaTarget() in families else families[0]
    lines = [_DISPATCH]
    for symbol in symbols:
        functions = {family: f"__tvm_ffi_{symbol}_{family.family}" for family in families}
        lines += [f'extern "C" Kernel {function};' for function in functions.values()]
        lines += [
            f'extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_{symbol}(',
            "    void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {",
            "  switch (ComputeCapability(arguments, count)) {",
            *(
                f"    case {arch.rstrip('a')}: "
                f"return {functions[family]}(self, arguments, count, result);"
                for arch, family in FAMILIES.items()
                if family in functions
            ),
            f"    default: return {functions[usual]}(self, arguments, count, result);",
            "  }",
            "}",
        ]
    return "\n".join(lines) + "\n"
