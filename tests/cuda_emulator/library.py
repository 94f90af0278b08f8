# SPDX-License-Identifier: Apache-2.0
"""Shared libraries of the emulator and of what runs on it, compiled once per content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

import tvm_ffi
from tvm_ffi import libinfo

from tvm_pagedkv.disk_cache import sealed_file

_RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-w", "-march=x86-64-v3", "-fno-strict-aliasing"),
    *(f"-I{_RUNTIME}", f"-I{libinfo.find_include_path()}"),
    f"-I{libinfo.find_dlpack_include_path()}",
)


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
def runtime() -> ctypes.CDLL:
    """The machine, loaded."""
    library = ctypes.CDLL(str(runtime_path()))
    library.emulator_copied_bytes.restype = ctypes.c_int64
    return library


def load(source: str) -> tvm_ffi.Module:
    """The functions of translated source."""
    machine = runtime_path()
    runtime()

    def build(path: Path) -> None:
        text = path.with_suffix(".cc")
        text.write_text(source)
        ffi = Path(libinfo.find_libtvm_ffi())
        links = [str(machine), str(ffi), f"-Wl,-rpath,{machine.parent},-rpath,{ffi.parent}"]
        _compile(["-O1", str(text), "-o", str(path), *links])

    key = [str(machine), _digest(source.encode()), *_FLAGS]
    return tvm_ffi.load_module(str(sealed_file(key, ".so", build)))


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *_FLAGS, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
