# SPDX-License-Identifier: Apache-2.0
"""Models whose caches bring compiled kernels: every way to build, link, export and move them."""

from __future__ import annotations

import re
import shutil
import tarfile
from functools import partial
from pathlib import Path

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.target import Target
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tir_kernels import build_kernel
from tvm_pagedkv.compiler import lowering
from tvm_pagedkv.compiler.build import kernel_spec
from tvm_pagedkv.relax import model_kernels
from tvm_pagedkv.relax.model_kernels import ModelKernels, link_when_finalized

from .. import reference
from ..runtime.test_loading import in_process
from ..support.harness.fast_compilation import MODEL_TARGET
from ..support.harness.foreign_code import runs_here
from ..support.harness.older_release import IS_OLDER, PREFIX
from .test_frontend import CAPACITIES, HEAD_DIM, AttentionOnly, check_fused, export_model

ROPE = reference.Rope(rotary_dim=HEAD_DIM)
AARCH64 = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"})
ELF_MACHINES = {62: "x86-64", 183: "aarch64"}


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A cache folder with nothing in it, for a process that has loaded nothing."""
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_kernels, "_loaded", {})
    return tmp_path / "cache"


def _symbols(module: tvm.IRModule) -> list[str]:
    """The kernels that a module refers to."""
    return re.findall(r'R\.ExternFunc\("(pagedkv_\w+)"\)', module.script())


def _machine(content: bytes) -> str:
    assert content[:4] == b"\x7fELF"
    return ELF_MACHINES[int.from_bytes(content[18:20], "little")]


def _create(vm: relax.VirtualMachine, function: str = "create", **changes):
    return vm[function](*(Shape([n]) for n in (CAPACITIES | changes).values()))


def _check(executable, function: str = "create", **reference_arguments) -> None:
    """Steps of a cache that a function of a model makes, against the reference."""
    vm = relax.VirtualMachine(executable, tvm.cpu())
    cache = _create(vm, function)
    check_fused(vm, cache, ROPE, "normal", steps=([18, 5], [1, 1]), **reference_arguments)
    cache.check_integrity()


# --- ways to build ------------------------------------------------------------------------------


def _rebuilding_pipeline() -> tvm.transform.Pass:
    """Return mlc-llm's pipeline, as far as apache-tvm has it; it refuses int64 buffers."""
    return tvm.transform.Sequential(
        [
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
            tirx.transform.ForceNarrowIndexToInt32(),
            relax.get_pipeline("default_build"),
        ]
    )


BUILDS = {
    "tvm.compile": tvm.compile,
    "relax.build": relax.build,
    "a pipeline that narrows": partial(relax.build, relax_pipeline=_rebuilding_pipeline()),
    "compiled functions": partial(relax.build, exec_mode="compiled"),
}


@pytest.mark.parametrize("way", BUILDS)
def test_ways_to_build(way):
    if IS_OLDER and way == "compiled functions":
        pytest.skip(PREFIX + "its compiled functions take no tuples")
    build = BUILDS[way]
    module = export_model(pkv.PagedKVCache)
    assert _symbols(module)
    assert not any(isinstance(f, tirx.PrimFunc) for f in module.functions.values())
    _check(build(module, target="llvm"))


def _with_cache(builder: relax.BlockBuilder, **extra) -> list[tvm.runtime.Module]:
    """Add a function that makes a cache, and return what the cache wants to be linked."""
    model = AttentionOnly(pkv.PagedKVCache, {}, **extra)
    params = [
        relax.Var(f"{name}_", relax.ShapeType([tirx.Var(name, "int64")])) for name in CAPACITIES
    ]
    with builder.function("create_cache", params):
        cache = model.create(*(param.ty.values[0] for param in params))
        builder.emit_func_output(cache._expr)
    return cache.extern_mods


def test_a_pass_that_makes_caches():
    """The way of mlc-llm: it attaches `extern_mods` itself, and so has every library twice."""
    module = export_model(pkv.PagedKVCache).without_attr("external_mods")
    builder = relax.BlockBuilder(module)
    libraries = _with_cache(builder)
    assert "external_mods" not in builder.get().attrs  # the module that it was given is unchanged
    built = builder.finalize()
    attached = built.attrs["external_mods"]
    assert list(attached) == libraries
    executable = tvm.compile(built.with_attr("external_mods", attached + libraries), "llvm")
    _check(executable, "create_cache")


class _WithOwnKernel(nn.ExternModule):
    def __init__(self, path: Path):
        self.path = path
        super().__init__({"tests_own": lambda x: x})

    def load(self):
        self.path.write_text(
            "int __tvm_ffi_tests_own(void* f, void* a, int n, void* r) {return 0;}"
        )
        tvm.support.cc.create_shared(f"{self.path}.o", [str(self.path)], ["-c", "-fPIC"])
        return self._load(f"{self.path}.o")


def test_beside_external_modules_of_the_model(tmp_path):
    module = export_model(pkv.PagedKVCache)
    own = _WithOwnKernel(tmp_path / "own.cc")
    linked = relax.transform.AttachExternModules([own])(module)
    assert len(linked.attrs["external_mods"]) == 1 + len(set(_symbols(module)))
    _check(tvm.compile(linked, "llvm"))


def test_outside_of_a_function():
    with pytest.raises(RuntimeError, match="in a method that export_tvm calls"):
        AttentionOnly(pkv.PagedKVCache, {}).create(4, 64, 16, 16, 0)


# --- several caches and models ------------------------------------------------------------------


class TwoCaches(AttentionOnly):
    """Two functions that make caches, for other RoPE or for the same."""

    def create_other(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ):
        saved = self.extra
        try:
            self.extra = saved.pop("other")
            return self.create(
                max_batch_size,
                max_total_seq_len,
                prefill_chunk_size,
                page_size,
                support_sliding_window,
            )
        finally:
            self.extra = saved


@pytest.mark.parametrize("softcap", [None, 0.5], ids=["alike", "unlike"])
def test_two_caches_of_a_model(softcap, tmp_path):
    model = TwoCaches(pkv.PagedKVCache, {}, other={"logit_softcap": softcap})
    plain = {"param_mode": "none", "effect_mode": "none"}
    sizes = {name: int for name in CAPACITIES} | {"$": plain}
    qkv = spec.Tensor([1, "n", 10, HEAD_DIM], "float32")
    cache = spec.Object(object_type=pkv.PagedKVCacheObject)
    module, _ = model.export_tvm(
        {
            "create_other": sizes,
            "create": sizes,
            "fused": {"qkv": qkv, "cache": cache, "$": plain},
        }
    )
    symbols = _symbols(module)
    assert len(module.attrs["external_mods"]) == len(set(symbols))
    path = tmp_path / "model.so"
    tvm.compile(module, target="llvm").export_library(str(path))
    loaded = tvm.runtime.load_module(str(path))
    _check(loaded)
    _check(loaded, "create_other", **({"softcap": softcap} if softcap else {}))


def test_kernels_that_differ_have_different_symbols(monkeypatch):
    monkeypatch.setattr(ModelKernels, "compile", lambda kernels: [])
    others = (
        {"logit_softcap": 0.5},
        {"kernel_page_size": 32},
        {"target": Target({"kind": "llvm", "mcpu": "x86-64-v3"})},
    )
    symbols = [set(_symbols(export_model(pkv.PagedKVCache, **x))) for x in ({}, {}, *others)]
    assert symbols[0] == symbols[1]
    assert all(f"pagedkv_{name}_" in " ".join(symbols[0]) for name in ("decode", "prefill"))
    for other, fields in zip(symbols[2:], others, strict=True):
        assert symbols[0].isdisjoint(other), fields
    monkeypatch.setattr(lowering, "code_versions", lambda *sources: ("other sources",))
    assert symbols[0].isdisjoint(_symbols(export_model(pkv.PagedKVCache)))


def test_caches_and_models_share_kernels(cache_dir, tmp_path):
    """An exported library holds its kernels, and the files serve every model and cache."""
    module = export_model(pkv.PagedKVCache)
    files = {path.name: path.stat().st_ino for path in cache_dir.glob("*.o")}
    assert len(files) == len(set(_symbols(module)))
    tvm.compile(module, target="llvm").export_library(str(tmp_path / "model.so"))

    model_kernels._loaded.clear()
    again = export_model(pkv.PagedKVCache)
    assert _symbols(again) == _symbols(module)
    pkv.build(pkv.KVCacheConfig(2, 6, 2, HEAD_DIM, dtype="float32"), target=MODEL_TARGET)
    later = {path.name: path.stat().st_ino for path in cache_dir.glob("*.o")}
    assert later.items() >= files.items()
    assert len(later) < len(files) + 3

    shutil.rmtree(cache_dir)
    _check(tvm.compile(again, target="llvm"))  # which holds what it was given
    moved = [tmp_path / name for name in ("one.so", "other.so")]
    for path in moved:  # two libraries of one process with the same symbols
        shutil.copy(tmp_path / "model.so", path)
    for loaded in [tvm.runtime.load_module(str(path)) for path in moved]:
        _check(loaded)


# --- other machines -----------------------------------------------------------------------------


def _model_of(name: str, target: Target) -> tvm.IRModule:
    """A model that refers to one kernel."""
    config = pkv.KVCacheConfig(1, 6, 2, HEAD_DIM, dtype="float32").resolved()
    spec = kernel_spec(config, config.layers[0], target)
    kernels = ModelKernels(target, name)
    builder = relax.BlockBuilder()
    with builder.function("kernel", []):
        kernel = kernels.refer(name, repr(spec), partial(build_kernel, name, spec))
        link_when_finalized(builder, kernels.compile())
        made = relax.call_pure_packed("tests.kernel", kernel, ty_args=relax.AnyType())
        builder.emit_func_output(builder.emit(made))
    return builder.finalize()


@pytest.mark.skipif(not runs_here("x86-64-v3"), reason="hides features of x86-64")
def test_a_cpu_without_what_the_kernels_need(monkeypatch, tmp_path):
    """The constructor of the cache refuses it, in the library as in the process that compiled."""
    target = Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    executable = tvm.compile(export_model(pkv.PagedKVCache, target=target), target="llvm")
    executable.export_library(str(tmp_path / "model.so"))
    monkeypatch.setenv("TVM_PAGEDKV_CPU_FEATURES", "sse2 avx fma")
    for each in (executable, tvm.runtime.load_module(str(tmp_path / "model.so"))):
        vm = relax.VirtualMachine(each, tvm.cpu())
        with pytest.raises(ValueError, match="the model's kernels cannot run here: .* abm avx2 b"):
            _create(vm)
    monkeypatch.delenv("TVM_PAGEDKV_CPU_FEATURES")
    _check(executable)


@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_another_x86_level(level, tmp_path):
    target = Target({"kind": "llvm", "mcpu": level})
    path = tmp_path / "model.so"
    tvm.compile(_model_of("merge", target), target).export_library(str(path))
    assert b"__tvm_ffi_pagedkv_merge_" in path.read_bytes()
    assert _machine(path.read_bytes()) == "x86-64"


def test_another_architecture(tmp_path):
    """Objects for AArch64 need no tools of its own; a library needs its linker."""
    path = tmp_path / "model.tar"
    tvm.compile(_model_of("decode", AARCH64), AARCH64).export_library(str(path))
    with tarfile.open(path) as archive:
        files = [member for member in archive if member.name.endswith(".o")]
        objects = [archive.extractfile(member).read() for member in files]
    assert {_machine(content) for content in objects} == {"aarch64"}
    assert any(b"__tvm_ffi_pagedkv_decode_" in content for content in objects)


# --- what users see when something is missing ---------------------------------------------------


def test_a_process_without_the_library(tmp_path):
    path = tmp_path / "model.so"
    tvm.compile(export_model(pkv.PagedKVCache), target="llvm").export_library(str(path))
    code = """
import sys, tvm
vm = tvm.relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
"""
    said = in_process(code, path, status=1)
    assert "Cannot find" in said
    assert "(import tvm_pagedkv, or load libtvm_pagedkv.so)" in said
    in_process("import tvm_pagedkv" + code, path, TVM_PAGEDKV_LIBRARY=str(pkv._library.path()))


def test_another_page_size_than_that_of_the_kernels():
    vm = relax.VirtualMachine(tvm.compile(export_model(pkv.PagedKVCache), "llvm"), tvm.cpu())
    message = "pages of 16 slots, but page_size is 32: .* page_size 16, or .* kernel_page_size=32"
    with pytest.raises(ValueError, match=message):
        _create(vm, page_size=32)


# --- the document -------------------------------------------------------------------------------


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
