# SPDX-License-Identifier: Apache-2.0
"""Open the store of a `PrefixCacheConfig`."""

from __future__ import annotations

import importlib
import os

from .interface import PageStore


def open_disk_store(path: str | os.PathLike, max_bytes: int) -> PageStore:
    """Open a folder of pages. Its module is imported for those only who use it."""
    return importlib.import_module(".disk", __package__).DiskStore(path, max_bytes)
