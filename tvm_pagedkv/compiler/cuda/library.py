# SPDX-License-Identifier: Apache-2.0
"""Compilation of CUDA C++ to libraries with device code of several architectures, and PTX.

It needs nvcc, but no GPU and no driver. The libraries need tvm-ffi, and a driver when they run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm_ffi import libinfo

# Linker flags: kernels may still be queued when the last cache that calls them is gone.
STAYS_LOADED = ("-z", "nodelete")
# Ampere, Ada, Hopper, Blackwell. The PTX is for the lowest, and for no GPU with an "a".
ARCHS = ("80", "86", "89", "90a", "100", "120")

_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_VERSION_SYMBOL = "pagedkv_cuda_version"
_VERSION = (
    f'\nextern "C" __attribute__((visibility("default"))) const int {_VERSION_SYMBOL} = '
    "CUDART_VERSION;\n"
)
_MAGIC = struct.pack("<I", 0xBA55ED50)
_KINDS = {1: "ptx", 2: "sass"}


@dataclass(frozen=True, order=True)
class DeviceCode:
    """Device code in a library: `kind` is "ptx" or "sass", `arch` a number such as 90."""

    kind: str
    arch: int


def compile_library(source: str, path: Path, archs: Sequence[str] = ARCHS) -> None:
    """Compile one translation unit, kernels and launchers, to a shared library.

    Parameters
    ----------
    source : str
        The result of `source.cuda_source`.
    path : Path
        The library to write.
    archs : sequence of str
        Compute capabilities, such as "90".

    Raises
    ------
    ValueError
        If `archs` is empty or has something else than numbers from 80 on.
    RuntimeError
        If nvcc is missing or fails; the message has its last lines.
    """
    _compile(source + _VERSION, path, archs, _library_flags())
    _require_all(archs, path)


def _library_flags() -> list[str]:
    folder = Path(libinfo.find_libtvm_ffi()).parent
    flags = [part for flag in (*STAYS_LOADED, "-s") for part in ("-Xlinker", flag)]
    return [*flags, "-shared", "-cudart", "static", f"-L{folder}", "-ltvm_ffi"]


def _require_all(archs: Sequence[str], path: Path) -> None:
    held = device_code(path)
    missing = {DeviceCode("sass", int(arch.rstrip("a"))) for arch in archs} - held
    if missing:
        raise RuntimeError(f"the library lacks {sorted(missing)}; it holds {sorted(held)}")


def compile_object(source: str, path: Path, archs: Sequence[str] = ARCHS) -> None:
    """Compile one translation unit to an object file that can be linked to a model.

    It contains the parts of the CUDA runtime that it needs, so any linker accepts it.

    Parameters
    ----------
    source, path, archs
        As for `compile_library`.

    Raises
    ------
    ValueError, RuntimeError
        As `compile_library`; RuntimeError also if the linker `ld` is missing.
    """
    bare = path.with_suffix(".bare.o")
    _compile(source, bare, archs, ["-c"])
    try:
        # Inline functions must not be merged with those of other objects with hidden symbols.
        _run("ld", "-r", "--force-group-allocation", bare, _static_runtime(), "-o", path)
        # Another object may contain the CUDA runtime too, and every source has these two symbols.
        _run(
            *("objcopy", "--wildcard", "--keep-global-symbol=__tvm_ffi_*"),
            *(f"--weaken-symbol=__tvm_ffi_{name}" for name in ("main", "_library_ctx")),
            path,
        )
    finally:
        bare.unlink()


def link_objects(objects: Sequence[Path], source: str, path: Path, archs: Sequence[str]) -> None:
    """Link object files, which `compile_object` wrote, and host code to a shared library.

    Parameters
    ----------
    objects : sequence of Path
    source : str
        C++ that calls the objects' functions.
    path : Path
        The library to write.
    archs : sequence of str
        Compute capabilities that the objects hold.

    Raises
    ------
    RuntimeError
        If nvcc is missing or fails, or if an object lacks device code.
    """
    text = path.with_suffix(".cc")
    text.write_text(source + _VERSION)
    try:
        _run(
            *(find_nvcc(), "-std=c++17", "-O2", "-Xcompiler", "-fPIC"),
            *(f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"),
            *(text, *objects, "-o", path, *_library_flags()),
        )
    finally:
        text.unlink()
    _require_all(archs, path)


def compile_ptx(source: str, arch: str) -> str:
    """Compile one translation unit to PTX.

    Parameters
    ----------
    source : str
        CUDA C++.
    arch : str
        A compute capability, such as "90".

    Returns
    -------
    str
        The PTX.

    Raises
    ------
    ValueError, RuntimeError
        As `compile_library`.
    """
    check_archs([arch])
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
        text.write_text(source)
        _run(
            *(find_nvcc(), "-std=c++17", "-O3", "-w", "-ptx", f"-arch=sm_{arch}"),
            *(f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"),
            *(text, "-o", path),
        )
        return path.read_text()


def _compile(source: str, path: Path, archs: Sequence[str], flags: Sequence[str]) -> None:
    check_archs(archs)
    nvcc = find_nvcc()
    text = path.with_suffix(".cu")
    text.write_text(source)
    lowest = min(archs, key=lambda arch: int(arch.rstrip("a")))
    codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
    if not lowest.endswith("a"):  # what such PTX asks for, later GPUs have not
        codes.append(f"arch=compute_{lowest},code=compute_{lowest}")
    try:
        _run(
            *(nvcc, "-std=c++17", "-O3", "-w", "-Xcompiler", "-fPIC", "--threads", "0"),
            *(part for code in codes for part in ("-gencode", code)),
            *(f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"),
            *(text, "-o", path, *flags),
        )
    finally:
        text.unlink()


def _run(*command: Any) -> None:
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no {command[0]} on PATH")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()[-12:]
        raise RuntimeError(f"{Path(command[0]).name} failed:\n" + "\n".join(lines))


def _static_runtime() -> Path:
    """Return the static CUDA runtime that belongs to nvcc."""
    roots = [Path(find_nvcc()).resolve().parents[1], Path(os.environ.get("CUDA_HOME", "/"))]
    for root in (*roots, Path("/usr/local/cuda")):
        for folder in (root / "lib64", *sorted(root.glob("targets/*/lib"))):
            if (folder / "libcudart_static.a").is_file():
                return folder / "libcudart_static.a"
    raise RuntimeError(f"there is no libcudart_static.a in lib64 or targets/*/lib of {roots[0]}")


def check_archs(archs: Sequence[str]) -> None:
    """Check compute capabilities.

    Raises
    ------
    ValueError
        If there are none, or one has no kernels.
    """
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}a?", arch) or int(arch.rstrip("a")) < 80:
            raise ValueError(
                f'archs must be numbers from "80" on, such as "90", since the kernels need compute '
                f"capability 8.0; got {arch!r}"
            )
    if not archs:
        raise ValueError('archs must name at least one architecture, such as "90"; got none')


def find_nvcc() -> str:
    """Return nvcc from ``$CUDA_HOME``, PATH, or the default folder of CUDA.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [homes[0] and f"{homes[0]}/bin/nvcc", shutil.which("nvcc"), f"{homes[1]}/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise RuntimeError(
        "compiling kernels for GPUs needs nvcc, of CUDA 12.8 or later: none in $CUDA_HOME/bin, on "
        "PATH or in /usr/local/cuda/bin"
    )


@functools.cache
def compiler_version() -> tuple[str, ...]:
    """Return the version that nvcc prints, and the flags that it takes from the environment.

    The tuple is empty without nvcc; then no compiled file is found in the disk cache.
    """
    try:
        said = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True).stdout
    except (OSError, RuntimeError):
        return ()
    flags = (f"{name}={os.environ.get(name, '')}" for name in _FLAG_VARIABLES)
    return said, *flags


def require_code_for(device: tvm.runtime.Device, path: Path) -> None:
    """Check that a GPU can run a library.

    Machine code runs on GPUs of the same major compute capability with an equal or higher minor
    one. The driver compiles PTX for its compute capability and all higher ones.

    Parameters
    ----------
    device : tvm.runtime.Device
    path : Path

    Raises
    ------
    RuntimeError
        If it cannot; the message names the GPU and the library's device code.
    """
    version = int(str(device.compute_version).replace(".", ""))
    held = device_code(path)
    for code in held:
        is_same = code.kind == "ptx" or code.arch // 10 == version // 10
        if is_same and code.arch <= version:
            return
    names = ", ".join(f"{code.kind} {code.arch}" for code in sorted(held)) or "nothing for GPUs"
    raise RuntimeError(
        f"the kernels cannot run on {device}, of compute capability {device.compute_version}: "
        f"their library holds {names}"
    )


def cuda_version(path: Path) -> int:
    """Return the version of CUDA that compiled a library, such as 13000 for 13.0."""
    return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), _VERSION_SYMBOL).value


def device_code(path: Path) -> set[DeviceCode]:
    """Return the device code in a library, read from the headers of its fat binaries."""
    content, found, at = path.read_bytes(), set(), 0
    while (at := content.find(_MAGIC, at)) >= 0:
        _, header_bytes, num_bytes = struct.unpack_from("<HHQ", content, at + 4)
        entry, end = at + header_bytes, at + header_bytes + num_bytes
        at += len(_MAGIC)
        if end > len(content):
            continue
        while entry + 32 <= end:
            kind, _, entry_bytes, payload_bytes = struct.unpack_from("<HHIQ", content, entry)
            (arch,) = struct.unpack_from("<I", content, entry + 28)
            if kind in _KINDS and payload_bytes:
                found.add(DeviceCode(_KINDS[kind], arch))
            if entry_bytes + payload_bytes == 0:
                break
            entry += entry_bytes + payload_bytes
    return found
