# SPDX-License-Identifier: Apache-2.0
"""mlc-llm's Python package from a clone."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path


def check_clone(clone: Path, *submodules: str) -> None:
    """Leave with a message if this is no clone of mlc-llm, or lacks one of its submodules."""
    file = clone / "python" / "mlc_llm" / "compiler_pass" / "dispatch_kv_cache_creation.py"
    if not file.is_file():
        sys.exit(f"{clone} is no clone of mlc-llm: it has no python/mlc_llm/compiler_pass")
    for name in submodules:
        if not (clone / "3rdparty" / name / "include").is_dir():
            sys.exit(f"{clone} lacks the submodule 3rdparty/{name}: git submodule update --init")


def import_from_clone(clone: Path, libraries: Path | None = None) -> None:
    """Make ``mlc_llm`` importable.

    The ``__init__`` of the package and of its engine import whatever a server needs. So bare
    packages with the same search paths stand in for them.

    Parameters
    ----------
    clone : Path
    libraries : Path, optional
        The folder of the C++ library. Without it there is no engine; the compiler is Python.
    """
    check_clone(clone)
    os.environ["SKIP_LOADING_MLCLLM_SO"] = "1" if libraries is None else "0"
    os.environ["MLC_LIBRARY_PATH"] = str(libraries or "")
    for name in ("mlc_llm", "mlc_llm.serve"):
        package = types.ModuleType(name)
        package.__path__ = [str(clone / "python" / name.replace(".", "/"))]
        sys.modules[name] = package
