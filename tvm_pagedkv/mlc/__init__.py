# SPDX-License-Identifier: Apache-2.0
"""mlc-llm with this package's cache: call ``install()`` before compiling or serving."""

from __future__ import annotations

from .install import install, uninstall
from .model_config import compiling

__all__ = ["compiling", "install", "uninstall"]
