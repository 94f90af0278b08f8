# SPDX-License-Identifier: Apache-2.0
"""`tvm_pagedkv.compile`, from the time when models with a cache needed it."""

from __future__ import annotations

import warnings
from typing import Any

import tvm


def compile(module: tvm.IRModule, target: Any = None, **options: Any) -> tvm.runtime.Executable:
    """Compile a model: the same as ``tvm.compile``.

    .. deprecated:: 0.1
        A `PagedKVCache` compiles its own kernels and links them to the model; call ``tvm.compile``.
    """
    warnings.warn("call tvm.compile instead", DeprecationWarning, stacklevel=2)
    return tvm.compile(module, target, **options)
