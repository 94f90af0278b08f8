# SPDX-License-Identifier: Apache-2.0
"""What the tests compile less of: nothing of it outlives the test."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading

import tvm_pagedkv as pkv
from tir_kernels import build_kernel
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler import build, targets

from ..support.harness import fast_compilation


def test_threads_that_make_caches_at_once_leave_the_compiler_as_it_was(monkeypatch):
    create = importlib.import_module("tvm_pagedkv.compiler.create")  # the package has a function so
    config = pkv.KVCacheConfig(num_layers=1, num_qo_heads=1, num_kv_heads=1, qk_head_dim=8)
    before = build._build_set, build._load
    inside = threading.Barrier(2)  # both threads are within
    monkeypatch.setattr(build, "warn_if_slow", lambda spec: inside.wait(60))
    for _ in range(40):  # they leave in either order
        with fast_compilation.when_called():
            made = []
            threads = [
                threading.Thread(
                    target=lambda made=made: made.append(create.build_libraries(config))
                )
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(made) == 2
            assert all(
                isinstance(source, fast_compilation._Source)
                for built in made
                for _, source in built.libraries
            )
        assert (build._build_set, build._load) == before


def test_processes_that_tests_start_compile_what_they_call(tmp_path):
    code = """
import tvm_pagedkv as pkv
from tvm_pagedkv.compiler import targets
cache = pkv.create(pkv.KVCacheConfig(1, 1, 1, 8, dtype="float32", max_total_tokens=64))
print(targets.resolve_target().export().get("opt-level"))
"""
    with fast_compilation.in_children():
        environment = os.environ | {"TVM_PAGEDKV_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
    assert list(tmp_path.glob("*.so")) == []


def test_kernels_are_linked_without_what_programs_begin_and_end_with(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path))
    spec = KernelSpec(2, 1, 8, 8)
    builders = {"copy_pages": functools.partial(build_kernel, "copy_pages", spec)}
    build.load_kernels(builders, ("copy", repr(spec)), targets.resolve_target())
    (library,) = tmp_path.glob("*.so")
    assert b"__cxa_finalize" not in library.read_bytes()  # g++ adds a call of it otherwise


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
