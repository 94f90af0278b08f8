# SPDX-License-Identifier: Apache-2.0
"""Compiled files on disk, built once per key and safe against several processes at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """Folder of compiled files: ``$TVM_PAGEDKV_CACHE``, or ``~/.cache/tvm_pagedkv``."""
    chosen = os.environ.get("TVM_PAGEDKV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm_pagedkv"


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
