# SPDX-License-Identifier: Apache-2.0
"""Text that every Python brings: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT = 10  # of so many files one is not trained on


def sources() -> tuple[list[str], list[str]]:
    """The sources to train on, and those held out, in alphabetical order of their paths.

    Tests and installed packages are not among them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [f for f in sorted(root.rglob("*.py")) if not skipped & set(f.parts)]
    trained: list[str] = []
    held_out: list[str] = []
    for i, file in enumerate(files):
        target = held_out if i % HELD_OUT == 0 else trained
        target.append(file.read_text(encoding="utf-8", errors="replace"))
    return trained, held_out
