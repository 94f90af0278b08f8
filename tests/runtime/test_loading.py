# SPDX-License-Identifier: Apache-2.0
"""The library in processes that have another copy of it, another TVM, or close it again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm_ffi import libinfo

from tvm_pagedkv import _library
from tvm_pagedkv.relax.own_creation import CREATE_IN_MODEL
from tvm_pagedkv.relax.stock_creation import CREATE_POSITIONALLY

from ..support.harness.cpp_build import run
from ..support.harness.fast_compilation import path_of_children

FFI = Path(libinfo.find_libtvm_ffi())
TVM = Path(tvm.__file__).parent
LIBRARY = _library.path()
# Python without the package: as a program in C++ loads the library.
BARE = f"""
import ctypes, os, sys
import tvm_ffi

def load(path, mode=ctypes.RTLD_GLOBAL):
    return ctypes.CDLL(str(path), mode=mode)

def why(path):
    return str(tvm_ffi.load_module(str(path)).get_function("pagedkv_why_not_registered")())

def create():
    return tvm_ffi.get_global_func("pagedkv.create")

RUNTIME = {str(TVM / "lib" / "libtvm_runtime.so")!r}
LIBRARY = {str(LIBRARY)!r}
MODEL_CONSTRUCTORS = {[CREATE_IN_MODEL, CREATE_POSITIONALLY]!r}
"""


def in_process(code: str, *arguments: str | Path, status: int = 0, **variables: str) -> str:
    """Return the output and errors of a new Python, which must exit with the status."""
    environment = {k: v for k, v in os.environ.items() if k != "TVM_PAGEDKV_LIBRARY"}
    environment["PYTHONPATH"] = path_of_children()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path) -> Path:
    """Another copy of the library."""
    return Path(shutil.copyfile(LIBRARY, tmp_path / "libtvm_pagedkv.so"))


def test_a_second_copy_registers_nothing(copy):
    code = """
load(RUNTIME); load(LIBRARY)
first = tvm_ffi.get_global_func("pagedkv.library")()
copy = sys.argv[1]
load(copy)  # as dlopen
assert why(LIBRARY) == ""
reason = why(copy)
assert f"has loaded tvm_pagedkv {first['version']} from {LIBRARY} already" in reason, reason
assert f"from {copy}" in reason, reason
assert tvm_ffi.get_global_func("pagedkv.library")()["path"] == LIBRARY
"""
    in_process(BARE + code, copy)


def test_python_uses_the_copy_that_the_process_has(copy):
    code = """
load(RUNTIME); load(sys.argv[1])
import tvm_pagedkv as pkv
cache = pkv.create(pkv.KVCacheConfig(1, 2, 2, 32, dtype="float32", max_total_tokens=64))
cache.add_sequence(0)
cache.check_integrity()
"""
    said = in_process(BARE + code, copy, TVM_PAGEDKV_LIBRARY=str(LIBRARY))
    assert f"from {copy} already, and uses that" in said


def test_python_refuses_another_version():
    """What another copy has registered, in so far as this one looks at it."""
    code = """
load(RUNTIME)
tvm_ffi.register_global_func("pagedkv.create", lambda: None)
tvm_ffi.register_global_func("pagedkv.library", lambda: {"version": "9.9.9", "path": "/other"})
import tvm_pagedkv
"""
    said = in_process(BARE + code, TVM_PAGEDKV_LIBRARY=str(LIBRARY), status=1)
    assert "ImportError: the process has loaded tvm_pagedkv 9.9.9 from /other already" in said


def test_names_that_others_have_taken():
    code = """
load(RUNTIME)
tvm_ffi.register_global_func("pagedkv.stats", lambda: None)
assert "pagedkv.stats" in why(LIBRARY), why(LIBRARY)
"""
    in_process(BARE + code)


def test_another_tvm(tmp_path):
    """A wheel of another version, whose runtime is ours."""
    (tmp_path / "tvm" / "lib").mkdir(parents=True)
    runtime = Path(shutil.copy(TVM / "lib" / "libtvm_runtime.so", tmp_path / "tvm" / "lib"))
    version = tmp_path / "tvm" / "_version.py"
    code = """
load(sys.argv[1]); load(LIBRARY)
for name in ("pagedkv.create", "pagedkv.load_bundle", *MODEL_CONSTRUCTORS):
    try:
        tvm_ffi.get_global_func(name)("bundle", None, None)
    except RuntimeError as error:
        print(error)
    except (TypeError, ValueError):
        pass  # of the arguments
print(why(LIBRARY) or "fits")
"""
    version.write_text("__version__ = version = '0.28.1.dev3'\n")
    lines = in_process(BARE + code, runtime).splitlines()
    assert len(lines) == 5 and len(set(lines)) == 1
    series = ".".join(tvm.__version__.split(".")[:2])
    said = f"built for apache-tvm {series}, but the process has loaded 0.28.1.dev3 from"
    assert said in lines[0]
    assert str(runtime) in lines[0]
    version.write_text(f"__version__ = version = '{series}.9'\n")
    assert in_process(BARE + code, runtime).splitlines()[-1] == "fits"
    version.unlink()
    assert in_process(BARE + code, runtime).splitlines()[-1] == "fits"


PROGRAM = """
#include <dlfcn.h>
#include <tvm/ffi/function.h>

#include <cstdio>

int main(int, char** arguments) {
  for (int i = 0; i < 2; ++i) {
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::puts(dlerror()), 1;
    auto version = tvm::ffi::Function::GetGlobalRequired("pagedkv.library");
    if (dlclose(library) != 0) return 2;
    version();  // its code is still there
  }
  if (dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL) == nullptr) return 3;
  auto create = tvm::ffi::Function::GetGlobalRequired("pagedkv.create");
  try {
    create();
  } catch (const tvm::ffi::Error& error) {
    return std::puts("done"), 0;
  }
  return 4;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_that_closes_it_and_loads_it_again(tmp_path, copy):
    source, program = tmp_path / "program.cc", tmp_path / "program"
    source.write_text(PROGRAM)
    includes = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    run(
        "g++", "-std=c++17", *(f"-I{path}" for path in includes), str(source), "-o", str(program),
        str(FFI), f"-Wl,-rpath,{FFI.parent},-rpath,{TVM / 'lib'}", "-ldl",
    )  # fmt: skip
    folders = os.pathsep.join([str(FFI.parent), str(TVM / "lib")])
    environment = os.environ | {"LD_LIBRARY_PATH": folders}
    assert run(str(program), str(LIBRARY), str(copy), env=environment) == "done\n"


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_nothing_else_is_exported():
    lines = run("nm", "-D", "--defined-only", str(LIBRARY)).splitlines()
    names = {line.split()[-1] for line in lines}
    assert names == {"__tvm_ffi_pagedkv_why_not_registered", "__tvm_ffi_pagedkv_version"}


def test_the_functions_of_the_library_itself():
    assert str(tvm_ffi.get_global_func("pagedkv.library")()["path"]) == str(LIBRARY)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
