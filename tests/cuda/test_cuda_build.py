# SPDX-License-Identifier: Apache-2.0
"""Libraries for GPUs, built without one: what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels import build_kernel, kernel_names
from tir_kernels.releases import export_cuda_host
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler.build import build_kernels
from tvm_pagedkv.compiler.cuda import families
from tvm_pagedkv.compiler.cuda.library import DeviceCode, compile_library, device_code, find_nvcc
from tvm_pagedkv.compiler.cuda.source import cuda_source

from ..support.cases.kernels.cuda_cases import F16, F32, make_spec

try:
    NVCC = find_nvcc()
except RuntimeError:
    NVCC = None
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


# --- libraries ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "merge.so"
    source = cuda_source({"merge": build_kernel("merge", make_spec((2, 1), 64))})
    compile_library(source, path, ("80", "90"))
    return path


@needs_nvcc
def test_a_library_holds_device_code_and_no_source(library):
    expected = {DeviceCode("sass", 80), DeviceCode("sass", 90), DeviceCode("ptx", 80)}
    assert device_code(library) == expected
    content = library.read_bytes()
    assert b"__launch_bounds__" not in content and b"#pragma" not in content


@needs_nvcc
def test_instructions_of_one_chip_have_no_ptx(tmp_path):
    """Later GPUs could not run it, though its number is lower."""
    compile_library('extern "C" __global__ void empty() {}', tmp_path / "x.so", ("90a",))
    assert device_code(tmp_path / "x.so") == {DeviceCode("sass", 90)}


@needs_nvcc
def test_a_library_loads_without_a_gpu_and_checks_arguments(library):
    merge = tvm_ffi.load_module(str(library)).get_function("merge")
    o, lse = (tvm.runtime.tensor(np.zeros((1, 2, *d), t)) for d, t in (((64,), F16), ((), F32)))
    with pytest.raises(ValueError, match="o.device_type.*\n.*\n.*expected cuda"):
        merge(o, lse, o, lse)


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("for (", "for(", "loops"),
        ("* __restrict__ ", " *__restrict__ ", "pointers to data"),
        ("numAttrs++]", "numAttrs]", "launches that may begin early"),
        ("#include <tvm/ffi/c_api.h>", "#include  <tvm/ffi/c_api.h>", "beginning of the host's"),
    ],
)
def test_code_that_is_printed_in_another_way_is_refused(monkeypatch, old, new, what):
    def export(module) -> str:
        text = export_cuda_host(module)
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(f"{cuda_source.__module__}.export_cuda_host", export)
    with pytest.raises(RuntimeError, match=f"[1-9] {what}.*, of which 0 look as expected"):
        cuda_source({"decode": build_kernel("decode", make_spec((2, 1), 64))})


@pytest.mark.parametrize(
    "archs, message",
    [((), "at least one"), (("75",), 'from "80" on'), (("sm_90",), "got 'sm_90'")],
)
def test_architectures_are_checked(archs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        compile_library("", tmp_path / "x.so", archs)


@needs_nvcc
def test_what_nvcc_says_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="nvcc failed.*(.|\n)*identifier"):
        compile_library("int x = y;", tmp_path / "x.so", ("80",))


# --- configurations -----------------------------------------------------------------------------

CONFIG = dict(num_layers=1, num_qo_heads=2, num_kv_heads=1, qk_head_dim=64, dtype=F16)
CAPACITIES = dict(max_num_sequences=1, max_total_tokens=64, prefill_chunk_size=16)


def test_a_configuration_is_built_for_gpus(monkeypatch):
    """All of its kernels go into one translation unit, for the architectures asked for."""
    sources = []

    def stop(source, path, archs):
        sources.append((source, archs))
        raise RuntimeError("enough")

    monkeypatch.setattr(families, "compile_library", stop)
    with pytest.raises(RuntimeError, match="enough"):
        build_kernels(pkv.KVCacheConfig(**CONFIG, **CAPACITIES), "cuda", archs=("90",))
    ((source, archs),) = sources
    assert archs == ("90",)
    for name in kernel_names(make_spec((2, 1), 64)):
        assert f"__tvm_ffi_pagedkv_{name}(" in source


@pytest.mark.parametrize("kind", ["mha", "mha_sliding", "mla"])
def test_gpus_have_the_kernels_that_cpus_have(kind):
    spec = make_spec((2, 1), 64, kind=kind)
    on_cpu = dataclasses.replace(spec, target=VectorTarget())
    on_gpu, on_cpu = set(kernel_names(spec)), set(kernel_names(on_cpu))
    assert on_gpu == on_cpu - {"append_prefill"}


def test_archs_are_for_gpus():
    with pytest.raises(ValueError, match='target "cuda"'):
        build_kernels(pkv.KVCacheConfig(**CONFIG, **CAPACITIES), archs=("80",))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
