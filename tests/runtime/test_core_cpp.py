# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ unit tests of the std-only core."""

from __future__ import annotations

import pytest

from ..support.harness.cpp_build import build, needs_cmake, run
from ..support.harness.selections import with_slow

pytestmark = needs_cmake

# Without optimisation: it takes most of the time, and sanitizers find no less.
FLAGS = {
    "plain": "-O0",
    "sanitized": "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O0",
}


@pytest.mark.parametrize("kind", with_slow(FLAGS, "sanitized"))
def test_core(kind):
    options = {"TVM_PAGEDKV_BUILD_TESTS": "ON", "CMAKE_CXX_FLAGS_RELEASE": FLAGS[kind]}
    folder = build(f"unit_tests_{kind}", "runtime_tests", **options)
    print(run("ctest", "--test-dir", str(folder), "--output-on-failure"))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
