# SPDX-License-Identifier: Apache-2.0
"""mlc-llm over this package's cache: ``tvm_pagedkv.mlc.install()`` before compiling or serving."""

from __future__ import annotations

from .install import install, uninstall
from .model_config import compiling

__all__ = ["compiling", "install", "uninstall"]
