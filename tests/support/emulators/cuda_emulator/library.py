# SPDX-License-Identifier: Apache-2.0
"""Shared libraries of the emulator and of what runs on it, compiled once per content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

import tvm
import tvm_ffi
from tvm_ffi import libinfo

from tvm_pagedkv.compiler.cuda.library import STAYS_LOADED
from tvm_pagedkv.compiler.disk_cache import sealed_file

from ...harness.foreign_code import runs_here

_FFI = Path(libinfo.find_libtvm_ffi())
_RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-w", "-fno-strict-aliasing"),
    *(["-march=x86-64-v3"] if runs_here("x86-64-v3") else []),
    *(f"-I{_RUNTIME}", f"-I{libinfo.find_include_path()}"),
    f"-I{libinfo.find_dlpack_include_path()}",
)
# Compiling takes most of a test's time, running next to none. What is precompiled must have the
# level of what uses it.
_KERNELS = "-O0"


@functools.cache
def runtime_path() -> Path:
    """The library of the machine itself."""
    sources = sorted(_RUNTIME.glob("*.cc"))
    content = _digest(*(path.read_bytes() for path in sorted(_RUNTIME.iterdir())))
    return sealed_file(
        ["emulator", content, *_FLAGS],
        ".so",
        lambda path: _compile(["-O3", *map(str, sources), "-o", str(path)]),
    )


@functools.cache
def _headers() -> list[str]:
    """Options that give `cuda.h` what it includes, precompiled: a third of a kernel's time."""
    text = (_RUNTIME / "cuda.h").read_text()
    includes = "\n".join(line for line in text.splitlines() if line.startswith("#include"))
    used = *sorted(_RUNTIME.glob("*.h")), *sorted(Path(libinfo.find_include_path()).rglob("*.h"))
    content = _digest(*(path.read_bytes() for path in used))
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout

    def precompile(path: Path) -> None:
        header = path.with_suffix(".h")
        header.write_text(includes)
        _compile([_KERNELS, "-x", "c++-header", str(header), "-o", str(path)])

    path = sealed_file(["headers", content, compiler, _KERNELS, *_FLAGS], ".gch", precompile)
    return ["-include", str(path.with_suffix(""))]


@functools.cache
def runtime() -> ctypes.CDLL:
    """The machine, loaded."""
    library = ctypes.CDLL(str(runtime_path()))
    library.emulator_copied_bytes.restype = ctypes.c_int64
    library.emulator_take_num_loads.restype = ctypes.c_int64
    library.emulator_take_num_pool_blocks.restype = ctypes.c_int64
    library.emulator_let_launchers_overlap.restype = ctypes.c_char_p
    return library


def load(source: str) -> tvm_ffi.Module:
    """The functions of translated source."""
    key = [str(runtime_path()), _digest(source.encode()), *_FLAGS, *STAYS_LOADED]
    return tvm_ffi.load_module(str(sealed_file(key, ".so", lambda path: build(source, path))))


def build(source: str, path: Path) -> None:
    """Compile translated source to a library."""
    runtime()
    text = path.with_suffix(".cc")
    text.write_text(source)
    stays_loaded = [f"-Wl,{','.join(STAYS_LOADED)}"]
    links = [*stays_loaded, *_links(runtime_path(), _FFI)]
    _compile(["-shared", _KERNELS, *_headers(), str(text), "-o", str(path), *links])


def build_object(source: str, path: Path) -> None:
    """Compile translated source to an object, for libraries that are loaded beside the machine."""
    ctypes.CDLL(str(runtime_path()), mode=ctypes.RTLD_GLOBAL)
    text = path.with_suffix(".cc")
    text.write_text(source)
    _compile([_KERNELS, "-c", *_headers(), str(text), "-o", str(path)])


@functools.cache
def device() -> tvm_ffi.Module:
    """The library of the emulated device, which takes the place of CUDA in TVM's runtime."""
    source = _RUNTIME.parent / "device" / "device.cc"
    content = _digest(*(path.read_bytes() for path in (source, source.with_suffix(".h"))))
    tvm_folder = Path(tvm.__file__).parent
    libraries = _links(runtime_path(), _FFI, tvm_folder / "lib" / "libtvm_runtime.so")
    include = f"-I{tvm_folder / 'include'}"
    runtime()
    key = [str(runtime_path()), content, *_FLAGS, *libraries]
    path = sealed_file(
        key,
        ".so",
        lambda path: _compile(
            ["-shared", "-O1", include, str(source), "-o", str(path), *libraries]
        ),
    )
    return tvm_ffi.load_module(str(path))


def _links(*libraries: Path) -> list[str]:
    folders = ",".join(f"-rpath,{library.parent}" for library in libraries)
    return [*map(str, libraries), f"-Wl,{folders}"]


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *_FLAGS, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
