# SPDX-License-Identifier: Apache-2.0
"""Compiled libraries on disk, built once per key and safe against several processes at a time."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import tvm
from tvm.support import cc

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_dir() -> Path:
    """Folder of compiled files: ``$TVM_PAGEDKV_CACHE``, or ``~/.cache/tvm_pagedkv``."""
    chosen = os.environ.get("TVM_PAGEDKV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm_pagedkv"


def cached_library(key: Iterable[str], compile_module: Callable[[], object]) -> tvm.runtime.Module:
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


def library_file(key: Iterable[str], compile_module: Callable[[], object]) -> Path:
    """The file of `cached_library`."""
    return sealed_file(key, ".so", lambda path: _link(compile_module(), path))


def load_library(path: Path) -> tvm.runtime.Module:
    """Load a library that is known to be whole."""
    return tvm.runtime.load_module(str(path))


def sealed_file(key: Iterable[str], suffix: str, build: Callable[[Path], None]) -> Path:
    """As `cached_file`, for object files and libraries; a damaged file is built anew."""

    def build_sealed(path: Path) -> None:
        build(path)
        with path.open("r+b") as file:  # what follows the sections of a library is nobody's
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)

    text = "\n".join(key)
    path = cached_file(text, suffix, build_sealed)
    if not _is_whole(path):
        path.unlink(missing_ok=True)
        path = cached_file(text, suffix, build_sealed)
    return path


@functools.cache
def code_versions(*sources: Path) -> tuple[str, ...]:
    """Of the compiler, of this package, and of the files and folders of Python that decide code."""
    try:
        own = importlib.metadata.version("tvm_pagedkv")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        own = "source"
    digest = hashlib.sha256()
    for source in sources:
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return tvm.__version__, own, digest.hexdigest()


def cached_file(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file that `build` makes for `key`, built now if this is the first time.

    Parameters
    ----------
    key : str
        All that decides the content (configuration, target, versions); it is hashed.
    suffix : str
        Ending of the file's name, such as ``".so"``.
    build : callable
        Writes the file at the path given to it. That path is a temporary one in the same folder;
        it is renamed when `build` returns, so a reader never sees half a file and two processes
        that build the same key do no harm to each other.

    Returns
    -------
    Path
        The finished file. Where the cache folder cannot be written, a temporary one serves.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32] + suffix
    final = cache_dir() / name
    if final.is_file():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".build-", dir=final.parent)
    except OSError:
        final = Path(tempfile.mkdtemp(prefix="tvm_pagedkv-")) / name
        scratch = tempfile.TemporaryDirectory(prefix=".build-", dir=final.parent)
    with scratch as folder:
        built = Path(folder) / name
        build(built)
        os.replace(built, final)
    return final


def _link(module, path: Path) -> None:
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


def _is_whole(path: Path) -> bool:
    """Whether a sealed file is as it was written; loading a cut one could crash the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
