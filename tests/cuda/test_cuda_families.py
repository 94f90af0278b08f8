# SPDX-License-Identifier: Apache-2.0
"""Libraries with kernels of several families of GPUs, and the choice among these."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import libinfo

from tir_kernels import build_kernel
from tir_kernels.spec import CudaTarget
from tvm_pagedkv.compiler.cuda import families
from tvm_pagedkv.compiler.cuda.library import DeviceCode, device_code

from ..support.cases.kernels.cuda_cases import F16, F32, make_spec
from .test_cuda_build import needs_nvcc

HOPPER = families.family_of("90a")
WIDTHS = {CudaTarget(): 64, HOPPER: 32}  # of the rows that the kernels of a family merge


def test_architectures_are_grouped():
    grouped = families.by_family(("80", "90a", "100"))
    assert grouped == {CudaTarget(): ("80", "100"), HOPPER: ("90a",)}


def test_architectures_without_kernels_of_their_own_run_the_usual_ones():
    assert families.by_family(("80", "90", "100a")) == {CudaTarget(): ("80", "90", "100a")}


@needs_nvcc
@pytest.mark.slow
def test_a_library_holds_every_family(tmp_path):
    def build(name, family):
        return build_kernel(name, make_spec((2, 1), WIDTHS[family], target=family))

    path = tmp_path / "merge.so"
    families.compile_families(build, {"merge": "pagedkv_merge"}, path, ("80", "90a"))
    sass = {DeviceCode("sass", 80), DeviceCode("sass", 90)}
    assert sass <= device_code(path)
    assert sorted(tmp_path.iterdir()) == [path]
    merge = tvm_ffi.load_module(str(path)).get_function("pagedkv_merge")
    # Arguments on the CPU are refused by the kernels that all GPUs run.
    o, lse = (tvm.runtime.tensor(np.zeros((1, 2, *d), t)) for d, t in (((64,), F16), ((), F32)))
    with pytest.raises(ValueError, match=r"n, 2, 64\](.|\n)*expected cuda"):
        merge(o, lse, o, lse)


class _Any(ctypes.Structure):
    """``TVMFFIAny`` with a pointer."""

    _fields_ = [
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("pointer", ctypes.c_void_p),
    ]


_CUDA = """
#pragma once
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
extern "C" int cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
"""
_KERNELS = """
#include <cuda_runtime.h>
#include <tvm/ffi/c_api.h>
static const int kVersions[] = {80, 90, 100};
extern "C" int cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const bool is_major = attribute == cudaDevAttrComputeCapabilityMajor;
  *value = is_major ? kVersions[device] / 10 : kVersions[device] % 10;
  return 0;
}
extern "C" int __tvm_ffi_k_sm_80(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return 80; }
extern "C" int __tvm_ffi_k_sm_90a(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return 90; }
"""


def test_the_device_of_the_first_argument_chooses(tmp_path):
    """The generated functions, with a CUDA runtime that knows three GPUs."""
    (tmp_path / "cuda_runtime.h").write_text(_CUDA)
    source = families._dispatch(["k"], list(WIDTHS)) + _KERNELS
    (tmp_path / "dispatch.cc").write_text(source)
    includes = (tmp_path, libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
        + ["dispatch.cc", "-o", "dispatch.so"],
        cwd=tmp_path,
        check=True,
    )
    kernel = ctypes.CDLL(str(tmp_path / "dispatch.so")).__tvm_ffi_k
    dl_tensor = 7  # kTVMFFIDLTensorPtr

    def chosen(device_type: int, device: int) -> int:
        # Of DLTensor only the start is read: data, type and index of the device.
        tensor = (ctypes.c_int32 * 16)(0, 0, device_type, device)
        argument = _Any(dl_tensor, 0, ctypes.addressof(tensor))
        return kernel(None, ctypes.byref(argument), 1, None)

    cpu, cuda = 1, 2
    assert [chosen(cuda, device) for device in range(3)] == [80, 90, 80]
    assert chosen(cpu, 1) == 80
    assert kernel(None, None, 0, None) == 80


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
