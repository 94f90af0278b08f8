# SPDX-License-Identifier: Apache-2.0
"""Loading of libtvm_pagedkv.so, after a check of the installed apache-tvm."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from pathlib import Path

from . import threads
from ._errors import CacheFullError

REQUIRED_TVM = "apache-tvm>=0.26,<0.28"
SERIES = ("0.26", "0.27")  # of apache-tvm


def _check_tvm_version() -> None:
    hint = f"install it with: pip install '{REQUIRED_TVM}'"
    try:
        version = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"tvm_pagedkv needs {REQUIRED_TVM}, which is not installed; {hint}"
        ) from None
    if ".".join(version.split(".")[:2]) not in SERIES:
        raise ImportError(f"tvm_pagedkv needs {REQUIRED_TVM}, found {version}; {hint}")


def has_compiler() -> bool:
    """Return whether the compiler of apache-tvm is here. Bundles run without it."""
    from tvm.base import _LOADED_LIBS

    return "tvm_compiler" in _LOADED_LIBS


def path() -> Path:
    """Return the path of the runtime library.

    The environment variable ``TVM_PAGEDKV_LIBRARY`` overrides the installed library, for example
    with a build that has sanitizers.

    Raises
    ------
    ImportError
        If the package has no library, or the variable names a file that does not exist.
    """
    chosen = os.environ.get("TVM_PAGEDKV_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise ImportError(f"TVM_PAGEDKV_LIBRARY is not a file: {chosen}")
        return Path(chosen)
    name = "libtvm_pagedkv.so"
    beside = Path(__file__).with_name(name)
    if beside.is_file():
        return beside
    try:
        files = importlib.metadata.files("tvm-pagedkv") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name and Path(file.locate()).is_file():
            return Path(file.locate()).resolve()
    raise ImportError(
        "tvm_pagedkv was not built with its library; build and install it with: pip install ."
    )


def load() -> None:
    """Load the library, which registers the global functions of the cache.

    If the process has already loaded another copy of this version, that copy is used and a
    RuntimeWarning says so.

    Raises
    ------
    ImportError
        If apache-tvm is missing or has another version, if the library was not built, or if the
        process has loaded another version of the library.
    """
    _check_tvm_version()
    threads.set_defaults()
    # tvm comes first: it registers the functions that the library overrides.
    import tvm  # noqa: F401
    import tvm_ffi

    tvm_ffi.register_error("CacheFullError", CacheFullError)
    module = tvm_ffi.load_module(path())
    reason = str(module.get_function("pagedkv_why_not_registered")())
    if not reason:
        return
    used = tvm_ffi.get_global_func("pagedkv.library", allow_missing=True)
    if used is None or str(used()["version"]) != str(module.get_function("pagedkv_version")()):
        raise ImportError(reason)
    warnings.warn(reason, RuntimeWarning, stacklevel=3)
