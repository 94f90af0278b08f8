# SPDX-License-Identifier: Apache-2.0
"""mlc-llm's Python package from a clone, without its C++ library."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path


def import_from_clone(clone: Path) -> None:
    """Make ``mlc_llm`` importable; its compiler is Python and needs no engine.

    The package's ``__init__`` imports the engine, whose classes live in the C++ library. So a bare
    package with the same search path stands in for it.
    """
    folder = clone / "python" / "mlc_llm"
    if not (folder / "compiler_pass" / "dispatch_kv_cache_creation.py").is_file():
        sys.exit(f"{clone} is no clone of mlc-llm: it has no python/mlc_llm/compiler_pass")
    os.environ["SKIP_LOADING_MLCLLM_SO"] = "1"
    package = types.ModuleType("mlc_llm")
    package.__path__ = [str(folder)]
    sys.modules["mlc_llm"] = package
