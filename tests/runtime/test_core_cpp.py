# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ unit tests of the std-only core, with sanitizers."""

from __future__ import annotations

import os

import pytest

from ..support.cpp_build import build_core, needs_cmake, run

pytestmark = needs_cmake


@pytest.mark.parametrize("one_seed_in", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_core(one_seed_in):
    folder = build_core("runtime_tests")
    environment = os.environ | {"RUNTIME_TESTS_ONE_SEED_IN": str(one_seed_in)}
    print(run("ctest", "--test-dir", str(folder), "--output-on-failure", env=environment))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
