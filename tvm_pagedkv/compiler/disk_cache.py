# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled files: each is built once per key, across processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.support import cc
from tvm.target import Target, codegen

from . import cache_folder
from .targets import require_runnable

_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_library(
    key: Iterable[str], compile_module: Callable[[], Any], target: Target
) -> tvm.runtime.Module:
    """Load the library of a key; compile it first if it is not in the cache.

    Parameters
    ----------
    key : iterable of str
        Everything that decides the code besides the target: configuration, versions.
    compile_module : callable
        Returns an object with ``export_library(path)``: the result of ``tvm.compile`` or
        ``tvm.tirx.build``, or `lowering.KernelObjects`.
    target : tvm.target.Target
        What the code is compiled for.

    Returns
    -------
    tvm.runtime.Module
        The library. A damaged file is rebuilt.

    Raises
    ------
    ValueError
        If this CPU cannot run code for the target.
    RuntimeError
        If the code cannot be linked; the message says what is missing.
    """
    return load_library(library_file([*key, str(target)], compile_module), target)


def library_file(key: Iterable[str], compile_module: Callable[[], Any]) -> Path:
    """Return the file that `cached_library` loads, without loading it."""
    return sealed_file(key, ".so", lambda path: _link(compile_module(), path))


def load_library(path: Path, target: Target) -> tvm.runtime.Module:
    """Load a library whose checksum has been verified.

    Machines with different CPUs may share the cache, and a caller may name another CPU than this
    one, so a library is loaded only if this CPU can run code for its target; else a ValueError.
    """
    require_runnable(target)
    return _loaded(path)


@functools.cache
def _loaded(path: Path) -> tvm.runtime.Module:
    """Load a library once: TVM keeps all that it ever loaded until the process ends."""
    return tvm.runtime.load_module(str(path))


def sealed_file(key: Iterable[str], suffix: str, build: Callable[[Path], None]) -> Path:
    """Return the file of a key; build it first if it is not in the cache.

    Parameters
    ----------
    key : iterable of str
        Everything that decides the content: configuration, target, versions. It is hashed.
    suffix : str
        Suffix of the file's name, such as ``".so"``.
    build : callable
        Writes the file at the path that it is given. The file is renamed when `build` returns, so
        readers never see an incomplete one. One process builds while others wait.

    Returns
    -------
    Path
        The complete file, with a verified checksum. A damaged one is rebuilt. The file is in
        `cache_folder.cache_dir`. If that folder cannot be written, or other users can write to it,
        the file is in a folder that lasts as long as the process, and a warning says so.

    Raises
    ------
    ValueError
        If ``$TVM_PAGEDKV_CACHE_MAX_MIB`` is not a positive integer.
    """
    key = list(key)
    found = found_file(key, suffix)
    if found:
        return found
    name = _file_name(key, suffix)
    limit = cache_folder.max_bytes()
    with cache_folder.building(name) as (folder, scratch):
        if _is_usable(folder / name):  # built by the previous owner of the lock
            return folder / name
        built = scratch / name
        build(built)
        with built.open("r+b") as file:  # loaders ignore what follows the sections
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        built.chmod(0o600)
        os.replace(built, folder / name)
    cache_folder.sweep(folder, limit)
    return folder / name


def found_file(key: Iterable[str], suffix: str) -> Path | None:
    """Return the file of a key if it is in the cache and undamaged; else None."""
    name = _file_name(key, suffix)
    paths = (folder / name for folder in cache_folder.folders())
    return next((path for path in paths if _is_usable(path)), None)


@functools.cache
def code_versions(*sources: Path) -> tuple[str, ...]:
    """Return what decides code besides configuration and target.

    Parameters
    ----------
    *sources : Path
        Python files, or folders of them, that generate the code.

    Returns
    -------
    tuple of str
        The versions of the compiler and of this package, the machine's triple (which a target may
        omit), and a digest of the sources.
    """
    try:
        own = importlib.metadata.version("tvm_pagedkv")
    except importlib.metadata.PackageNotFoundError:  # not installed: run from a source tree
        own = "source"
    digest = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            name = str(file.relative_to(source.parent))
            content = hashlib.sha256(file.read_bytes()).digest()
            digest.update(name.encode() + b"\0" + content)
    compiler = (tvm.__version__, tvm_ffi.__version__, str(codegen.llvm_version_major()))
    return *compiler, own, str(codegen.llvm_get_system_triple()), digest.hexdigest()


def _file_name(key: Iterable[str], suffix: str) -> str:
    return hashlib.sha256("\n".join(key).encode()).hexdigest()[:32] + suffix


def _link(module: Any, path: Path) -> None:
    compiler = cc.get_cc()
    if compiler is None:
        raise RuntimeError(
            "cannot link compiled code: no C++ compiler (g++, clang++) on PATH; install one or "
            "name it in the environment variable CXX"
        )
    try:
        module.export_library(str(path))
    except OSError as error:
        raise RuntimeError(
            f"cannot link compiled code: running {compiler!r} gave {error}"
        ) from error


def _is_usable(path: Path) -> bool:
    """Return whether a file is trusted and undamaged. Loading a truncated one could crash."""
    try:
        cache_folder.require_trusted(path.parent)
        cache_folder.require_trusted(path)
        content = path.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return False
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)  # its last use, for `cache_folder.sweep`
    return True
