# SPDX-License-Identifier: Apache-2.0
"""Models for GPUs: their kernels are compiled by nvcc and linked in, or run emulated."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

import tvm_pagedkv as pkv
from tir_kernels import build_kernel
from tvm_pagedkv.compiler.cuda import objects as cuda_objects
from tvm_pagedkv.compiler.cuda.library import DeviceCode, device_code
from tvm_pagedkv.relax import model_kernels
from tvm_pagedkv.relax.model_kernels import ModelKernels, link_when_finalized

from .. import reference
from ..cuda.test_cuda_build import needs_nvcc
from ..support.cases.kernels.cuda_cases import F16, make_spec
from ..support.emulators.cuda_emulator import library
from ..support.emulators.cuda_emulator.translate import translate
from .test_frontend import export_model

GPU = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
KEEP = "tests.keep_kernel"


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_kernels, "_loaded", {})


def _model_of_merge(*more: tuple[int, int]) -> tvm.IRModule:
    """A model that gives away its kernels: an object with one for each choice of heads."""
    builder = relax.BlockBuilder()
    with builder.function("create", []):
        kept = []
        for heads in ((2, 1), *more):
            spec = make_spec(heads, 64)
            kernels = ModelKernels(GPU, repr(spec))
            merge = kernels.refer("merge", repr(spec), partial(build_kernel, "merge", spec))
            link_when_finalized(builder, kernels.compile())
            kept.append(relax.call_pure_packed(KEEP, merge, ty_args=relax.AnyType()))
        builder.emit_func_output(builder.emit(relax.Tuple([builder.emit(call) for call in kept])))
    return builder.finalize()


def _kernel_of(executable) -> tvm_ffi.Function:
    kept = []
    tvm_ffi.register_global_func(KEEP, lambda f: kept.append(f) or f)
    try:
        relax.VirtualMachine(executable, tvm.cpu())["create"]()
    finally:
        tvm_ffi.registry.remove_global_func(KEEP)
    return kept[0]


def _states(rng) -> list[np.ndarray]:
    return [
        array
        for _ in range(2)
        for array in (
            rng.standard_normal((3, 2, 64)).astype(F16),
            rng.standard_normal((3, 2)).astype("float32"),
        )
    ]


@needs_nvcc
@pytest.mark.slow
def test_an_exported_library_holds_device_code(tmp_path):
    path = tmp_path / "model.so"
    model = _model_of_merge((4, 1))
    assert len(model.attrs["external_mods"]) == 2
    tvm.compile(model, GPU).export_library(str(path))
    assert device_code(path) == {DeviceCode("sass", 90), DeviceCode("ptx", 90)}
    assert b"__launch_bounds__" not in path.read_bytes()
    merge = _kernel_of(tvm.runtime.load_module(str(path)))
    with pytest.raises(ValueError, match="o.device_type.*\n.*\n.*expected cuda"):
        merge(*map(tvm.runtime.tensor, _states(np.random.default_rng(0))))


def test_linked_kernels_run(monkeypatch):
    def compile_object(source, path, archs):
        library.build_object(translate(source), path)

    monkeypatch.setattr(cuda_objects, "compile_object", compile_object)
    merge = _kernel_of(tvm.compile(_model_of_merge(), GPU))
    o, lse, other, other_lse = states = _states(np.random.default_rng(0))
    expected = reference.merge(o, lse, other, other_lse)
    actual = [tvm.runtime.tensor(array) for array in states]
    merge(*actual)
    reference.assert_state_close([x.numpy() for x in actual[:2]], expected, states[0].dtype)


@pytest.mark.parametrize("kinds", ["mha", ["mha_sliding", "mha"]])
def test_a_model_has_all_kernels_of_its_caches(kinds, monkeypatch):
    sources = []

    def stop(source, path, archs):
        sources.append((source, archs))
        raise RuntimeError("enough")

    monkeypatch.setattr(cuda_objects, "compile_object", stop)
    with pytest.raises(RuntimeError, match="enough"):
        export_model(pkv.PagedKVCache, kinds=kinds, target=GPU)
    ((source, archs),) = sources
    assert archs == ["90"]
    monkeypatch.setattr(ModelKernels, "compile", lambda kernels: [])  # the names are enough
    on_cpu = export_model(pkv.PagedKVCache, kinds=kinds).script()
    digest = "_[0-9a-f]{16}"
    names = set(re.findall(rf"__tvm_ffi_(pagedkv_\w+){digest}\(", source))
    on_cpus_only = {"pagedkv_append_prefill"}
    expected = set(re.findall(rf'ExternFunc\("(pagedkv_\w+){digest}"', on_cpu))
    assert names == expected - on_cpus_only
    assert on_cpus_only <= expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target": Target({"kind": "cuda", "arch": "sm_75"}, host="llvm")}, 'from "80" on'),
        ({"target": GPU, "runtime": "stock"}, "runtime 'pagedkv' only"),
        (
            {"target": Target({"kind": "cuda", "arch": "sm_90"}, host=ARM)},
            "hosts like this machine",
        ),
        ({"target": Target({"kind": "vulkan"}, host="llvm")}, "not for 'vulkan'"),
    ],
)
def test_what_has_no_kernels_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        export_model(pkv.PagedKVCache, **fields)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
