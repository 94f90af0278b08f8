# SPDX-License-Identifier: Apache-2.0
"""Steps allocate nothing once they are warm: a C++ program counts every allocation."""

from __future__ import annotations

import sys

import pytest

from tvm_pagedkv import _library

from ..support.harness.cpp_build import build, needs_cmake, run


@needs_cmake
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="replaces glibc's malloc")
def test_steps_allocate_nothing():
    folder = build("programs", "allocation_test", TVM_PAGEDKV_BUILD_BENCH="ON")
    print(run(str(folder / "allocation_test"), str(_library.path())))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
