# SPDX-License-Identifier: Apache-2.0
"""GGUF files as sources of models."""

from .model_file import GgufModel

__all__ = ["GgufModel"]
