# SPDX-License-Identifier: Apache-2.0
"""Modules of kernels with a mistake in their source, for TVMScript cannot be patched."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def mutated_module(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Import a module again with a piece of its source replaced, which it has exactly once.

    Parameters
    ----------
    folder : Path
        Where the source is written, for readers of TVMScript look it up.
    """
    source = Path(module.__file__).read_text()
    if source.count(old) != 1:
        raise ValueError(f"{module.__name__} has {old!r} {source.count(old)} times")
    file = folder / Path(module.__file__).name
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    return mutated
