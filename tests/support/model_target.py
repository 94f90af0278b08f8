# SPDX-License-Identifier: Apache-2.0
"""Targets of the models in tests, without LLVM's optimisations.

These take most of the time that such a test takes, and kernels have tests of their own, optimised
as in production. What decides about a kernel's TIR stays: vectors are as wide as this CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tvm.target import Target

from tvm_pagedkv.compiler import targets

MODEL_TARGET = Target({"kind": "llvm", "opt-level": 0})  # any x86-64


@contextmanager
def unoptimized() -> Iterator[None]:
    """Compile for this CPU without optimisations wherever no target is named."""
    native = targets.resolve_target("native").export()
    fields = {name: native[name] for name in ("kind", "mcpu", "mattr") if name in native}
    target = Target(fields | {"opt-level": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_native_target", lambda: target)
        yield
