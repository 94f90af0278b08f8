# SPDX-License-Identifier: Apache-2.0
"""`tvm_pagedkv.compile`, which is deprecated."""

from __future__ import annotations

import warnings
from typing import Any

import tvm


def compile(module: tvm.IRModule, target: Any = None, **options: Any) -> tvm.runtime.Executable:
    """Compile a model, as ``tvm.compile`` does.

    .. deprecated:: 0.1
        Call ``tvm.compile``: a `PagedKVCache` compiles its kernels and links them to the model.
    """
    warnings.warn("call tvm.compile instead", DeprecationWarning, stacklevel=2)
    return tvm.compile(module, target, **options)
