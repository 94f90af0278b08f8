# SPDX-License-Identifier: Apache-2.0
"""The command line: ``tvm-pagedkv``."""

from .command import main

__all__ = ["main"]
