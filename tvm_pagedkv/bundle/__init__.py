# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time: written here, loaded where there is no compiler."""

from .load import Bundle, load_bundle

__all__ = ["Bundle", "load_bundle"]
