# SPDX-License-Identifier: Apache-2.0
"""Libraries for GPUs, built without one: what they hold, and what ptxas says of the kernels."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels import build_kernel, kernel_names
from tir_kernels.spec import RopeSpec
from tvm_pagedkv import cuda_build
from tvm_pagedkv.build import build_kernels
from tvm_pagedkv.cuda_library import DeviceCode, compile_library, device_code, find_nvcc
from tvm_pagedkv.cuda_source import cuda_source

from .attention_cases import cuda_text
from .cuda_cases import BF16, F16, F32, make_spec

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
def test_a_library_loads_without_a_gpu_and_checks_arguments(library):
    merge = tvm_ffi.load_module(str(library)).get_function("merge")
    o, lse = (tvm.runtime.tensor(np.zeros((1, 2, *d), t)) for d, t in (((64,), F16), ((), F32)))
    with pytest.raises(ValueError, match="o.device_type.*\n.*\n.*expected cuda"):
        merge(o, lse, o, lse)


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

    monkeypatch.setattr(cuda_build, "compile_library", stop)
    with pytest.raises(RuntimeError, match="enough"):
        build_kernels(pkv.KVCacheConfig(**CONFIG, **CAPACITIES), "cuda", archs=("90",))
    ((source, archs),) = sources
    assert archs == ("90",)
    for name in kernel_names(make_spec((2, 1), 64)):
        assert f"__tvm_ffi_pagedkv_{name}(" in source


def test_archs_are_for_gpus():
    with pytest.raises(ValueError, match='target "cuda"'):
        build_kernels(pkv.KVCacheConfig(**CONFIG, **CAPACITIES), archs=("80",))


# --- what ptxas says ----------------------------------------------------------------------------

GATED = {
    "prefill-128-f16": ("prefill", make_spec((8, 2), 128)),
    "prefill-256-bf16": ("prefill", make_spec((2, 1), 256, (BF16, BF16))),
    "prefill_sliding-64-f16": ("prefill_sliding", make_spec((4, 2), 64)),
    "prefill_ragged-128-f32": ("prefill_ragged", make_spec((4, 2), 128, (F32, F32))),
    "prefill-256-f32": ("prefill", make_spec((2, 1), 256, (F32, F32))),
    "prefill-128-f16-bf16": ("prefill", make_spec((2, 1), 128, (F16, BF16))),
    "prefill-128-cap-alibi": (
        "prefill",
        make_spec((2, 1), 128, logit_softcap=30.0, alibi_slopes=(0.5, 0.25)),
    ),
    "tree_paged_sliding-128-f16": ("tree_paged_sliding", make_spec((8, 2), 128)),
    "mla_prefill-512-bf16": (
        "mla_prefill",
        make_spec((16, 1), (576, 512), (BF16, BF16), kind="mla", rope=RopeSpec(rotary_dim=0)),
    ),
    "decode-128-f16": ("decode", make_spec((8, 2), 128)),
    "decode-256-bf16": ("decode", make_spec((8, 2), 256, (BF16, BF16))),
    "decode-128-f32": ("decode", make_spec((8, 2), 128, (F32, F32))),
    "decode-64-bf16-f16": ("decode", make_spec((71, 1), 64, (BF16, F16))),
    "decode_sliding-128-cap-alibi": (
        "decode_sliding",
        make_spec((71, 1), 128, logit_softcap=30.0, alibi_slopes=(0.5,) * 71),
    ),
    "rope_append-128-f16": ("rope_append", make_spec((8, 2), 128)),
}


def _instructions(name: str, spec) -> list[str]:
    """What the code of a kernel must have."""
    if name == "rope_append":
        return ["ld.global.v4.b32", "st.global.v4.b32"]
    is_tensor = spec.dtype == spec.kv_dtype != F32
    products = ["ldmatrix.sync.aligned.m8n8.x4", "mma.sync.aligned.m16n8k16"]
    return ["cp.async.cg.shared.global", "st.global.v4.b32", *(products if is_tensor else [])]


@needs_nvcc
@pytest.mark.parametrize("name, spec", GATED.values(), ids=GATED)
def test_kernels_stay_in_registers(name, spec, tmp_path):
    """No spills and no local memory, on Ampere and on Hopper; wide and asynchronous accesses."""
    source = cuda_text(name, spec)
    text, assembly = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    text.write_text(source[: source.index("#include <tvm/ffi/c_api.h>")])
    subprocess.run(
        [NVCC, "-ptx", "-std=c++17", "-O3", "-w", "-arch=compute_80", str(text), "-o", assembly],
        check=True,
    )
    instructions = assembly.read_text()
    for instruction in _instructions(name, spec):
        assert instruction in instructions
    ptxas = re.sub(r"nvcc$", "ptxas", NVCC)
    for arch in ("sm_80", "sm_90"):
        told = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", assembly, "-o", tmp_path / "kernel.cubin"],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
        kept = told.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
        assert kept == told.count("Compiling entry function"), told
        assert "lmem" not in told, told
