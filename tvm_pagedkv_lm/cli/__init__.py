# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-pagedkv``.

It is a package of its own because ``import tvm_pagedkv`` loads TVM and registers the cache, which
takes seconds. ``--help``, ``--version`` and mistakes in the arguments need neither, so nothing here
imports ``tvm_pagedkv`` before the arguments are parsed.
"""

from .command import main

__all__ = ["main"]
