# SPDX-License-Identifier: Apache-2.0
"""Models whose kernels are compiled on their own: in process, exported, and without our kernels."""

from __future__ import annotations

import shutil

import pytest
import tvm
from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode, TIRPagedKVCache
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from . import reference
from .test_frontend import CAPACITIES, HEAD_DIM, check_fused, export_model


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _check(executable) -> None:
    vm = relax.VirtualMachine(executable, tvm.cpu())
    cache = vm["create"](*(Shape([n]) for n in CAPACITIES.values()))
    check_fused(vm, cache, reference.Rope(rotary_dim=HEAD_DIM), "normal", [7, None])
    cache.check_integrity()


def test_an_exported_library_holds_its_kernels(cache_dir, tmp_path):
    kinds = {"kinds": ["mha_sliding", "mha"], "layer_sliding_window_size": 7}
    module = export_model(pkv.PagedKVCache, **kinds)
    names = {name.name_hint for name in module.get_global_vars()}
    executable = pkv.compile(module, target="llvm")
    assert {name.name_hint for name in module.get_global_vars()} == names  # it is left as it was
    executable.export_library(str(tmp_path / "model.so"))
    written = {path.name: path.stat().st_ino for path in cache_dir.glob("*.o")}
    assert len(written) == len([name for name in names if name.startswith("pagedkv_")])

    again = pkv.compile(export_model(pkv.PagedKVCache, **kinds), target="llvm")
    assert {path.name: path.stat().st_ino for path in cache_dir.glob("*.o")} == written
    _check(again)  # not exported

    shutil.rmtree(cache_dir)
    moved = tmp_path / "elsewhere.so"
    (tmp_path / "model.so").rename(moved)
    _check(tvm.runtime.load_module(str(moved)))


def test_caches_and_models_share_kernels(cache_dir):
    pkv.compile(export_model(pkv.PagedKVCache), target="llvm")
    before = {path.name for path in cache_dir.glob("*.o")}
    pkv.build(
        pkv.KVCacheConfig(2, 6, 2, HEAD_DIM, dtype="float32"), target=tvm.target.Target("llvm")
    )
    after = {path.name for path in cache_dir.glob("*.o")}
    assert before <= after
    assert len(after) < len(before) + 3


def test_modules_without_our_kernels(cache_dir):
    @tvm.script.ir_module
    class Plain:
        @tvm.script.relax.function
        def main(x: tvm.script.relax.Tensor((4,), "float32")):
            return x

    assert pkv.compile(Plain, "llvm")
    assert pkv.compile(export_model(TIRPagedKVCache, {"mode": RopeMode.NORMAL}), target="llvm")
    assert not list(cache_dir.glob("*"))
