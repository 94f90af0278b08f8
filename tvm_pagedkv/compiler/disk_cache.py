# SPDX-License-Identifier: Apache-2.0
"""Compiled libraries on disk, built once per key whoever asks for them."""

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
from tvm.target import codegen

from . import cache_folder

_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_library(key: Iterable[str], compile_module: Callable[[], Any]) -> tvm.runtime.Module:
    """The library that `compile_module` makes for `key`, compiled now if this is the first time.

    Parameters
    ----------
    key : iterable of str
        All that decides the code: configuration, target, versions.
    compile_module : callable
        Returns what has ``export_library(path)``: what ``tvm.compile`` or ``tvm.tirx.build`` made,
        or `lowering.KernelObjects`.

    Returns
    -------
    tvm.runtime.Module
        Loaded from the file. A damaged file is built anew.

    Raises
    ------
    RuntimeError
        When the code cannot be linked; the message tells what is missing.
    """
    return load_library(library_file(key, compile_module))


def library_file(key: Iterable[str], compile_module: Callable[[], Any]) -> Path:
    """The file of `cached_library`."""
    return sealed_file(key, ".so", lambda path: _link(compile_module(), path))


def load_library(path: Path) -> tvm.runtime.Module:
    """Load a library that is known to be whole."""
    return tvm.runtime.load_module(str(path))


def sealed_file(key: Iterable[str], suffix: str, build: Callable[[Path], None]) -> Path:
    """The object file or library that `build` makes for `key`, built if this is the first time.

    Parameters
    ----------
    key : iterable of str
        All that decides the content (configuration, target, versions); it is hashed.
    suffix : str
        Ending of the file's name, such as ``".so"``.
    build : callable
        Writes the file at the path given to it, in a folder of its own. It is renamed when `build`
        returns, so a reader never sees half a file, and one process builds while others wait.

    Returns
    -------
    Path
        The finished file, checked: a damaged one is built anew. It lies in `cache_folder.cache_dir`
        or, with a warning, in a folder that goes with the process, where that one cannot be
        written or other users may write there too.

    Raises
    ------
    ValueError
        When ``$TVM_PAGEDKV_CACHE_MAX_MIB`` is no positive integer.
    """
    key = list(key)
    found = found_file(key, suffix)
    if found:
        return found
    name = _file_name(key, suffix)
    limit = cache_folder.max_bytes()
    with cache_folder.building(name) as (folder, scratch):
        if _is_usable(folder / name):  # by the process that had the lock before
            return folder / name
        built = scratch / name
        build(built)
        with built.open("r+b") as file:  # what follows the sections of a library is nobody's
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        built.chmod(0o600)
        os.replace(built, folder / name)
    cache_folder.sweep(folder, limit)
    return folder / name


def found_file(key: Iterable[str], suffix: str) -> Path | None:
    """The file of `sealed_file` where it has been built before, checked; else None."""
    name = _file_name(key, suffix)
    paths = (folder / name for folder in cache_folder.folders())
    return next((path for path in paths if _is_usable(path)), None)


@functools.cache
def code_versions(*sources: Path) -> tuple[str, ...]:
    """What decides code besides configuration and target.

    These are the versions of the compiler and of this package, the machine's triple, which targets
    need not name, and a digest of `sources`: Python files, and folders of them.
    """
    try:
        own = importlib.metadata.version("tvm_pagedkv")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
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
    """Whether a file is there, trusted and as it was written; loading a cut one could crash."""
    try:
        cache_folder.require_trusted(path.parent)
        cache_folder.require_trusted(path)
        content = path.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return False
    with contextlib.suppress(OSError):  # in a folder that this process may only read
        os.utime(path)  # for `cache_folder.sweep`
    return True
