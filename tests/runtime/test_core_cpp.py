# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ unit tests of the std-only core, with sanitizers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..support.cpp_build import build, build_core, needs_cmake, run

pytestmark = needs_cmake

# Without optimisation: it takes most of the time, and sanitizers find no less.
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O0"


def run_unit_tests(folder: Path, **environment: str) -> None:
    command = ["ctest", "--test-dir", str(folder), "--output-on-failure"]
    print(run(*command, env=os.environ | environment))


def test_core():
    """The build is that of the fuzz targets, and random tests run one seed in three."""
    run_unit_tests(build_core("runtime_tests"), RUNTIME_TESTS_ONE_SEED_IN="3")


@pytest.mark.slow
def test_core_with_all_seeds_and_sanitizers():
    options = {"TVM_PAGEDKV_BUILD_TESTS": "ON", "CMAKE_CXX_FLAGS_RELEASE": FLAGS}
    run_unit_tests(build("unit_tests", "all", **options))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
