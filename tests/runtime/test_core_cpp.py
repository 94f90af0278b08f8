# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ unit tests of the std-only core."""

from __future__ import annotations

from ..support.cpp_build import build, needs_cmake, run

pytestmark = needs_cmake

# Without optimisation: it takes most of the time, and sanitizers find no less.
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O0"


def test_core():
    options = {"TVM_PAGEDKV_BUILD_TESTS": "ON", "CMAKE_CXX_FLAGS_RELEASE": FLAGS}
    folder = build("unit_tests", "all", **options)
    print(run("ctest", "--test-dir", str(folder), "--output-on-failure"))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
