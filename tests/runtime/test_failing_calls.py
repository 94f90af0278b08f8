# SPDX-License-Identifier: Apache-2.0
"""Transfers in which memory runs out change nothing: a C++ program fails every allocation once."""

from __future__ import annotations

import sys

import pytest

from tvm_pagedkv import _library

from ..support.harness.cpp_build import build, needs_cmake, run


@needs_cmake
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="replaces operator new")
def test_a_transfer_without_memory_changes_nothing():
    folder = build("programs", "failing_call_test", TVM_PAGEDKV_BUILD_BENCH="ON")
    print(run(str(folder / "failing_call_test"), str(_library.path())))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
