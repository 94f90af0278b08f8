# SPDX-License-Identifier: Apache-2.0
"""Bundles: folders with kernels compiled ahead of time, loaded where there is no compiler."""

from .._library import has_compiler
from .load import Bundle, describe_config, load_bundle, read_config

__all__ = ["Bundle", "describe_config", "load_bundle", "read_config"]

if has_compiler():
    from .writer import write_bundle  # noqa: F401

    __all__ += ["write_bundle"]
