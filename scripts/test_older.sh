#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the quick tests with the oldest apache-tvm that is served, in a virtual environment of its own.
# The C++ is compiled in half the time, with -O1: what optimisation makes of it is for the other run.
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
echo 'apache-tvm==0.26.*' >build/older.txt
export PIP_CONSTRAINT="$PWD/build/older.txt" TVM_PAGEDKV_VENV="$PWD/.venv-older"
export SKBUILD_BUILD_DIR="build/older" SKBUILD_CMAKE_DEFINE="CMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"
exec scripts/test.sh -m quick "$@"
