#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the quick tests with the oldest apache-tvm that is served, in a virtual environment of its own.
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
echo 'apache-tvm==0.26.*' >build/older.txt
export PIP_CONSTRAINT="$PWD/build/older.txt" TVM_PAGEDKV_VENV="$PWD/.venv-older"
export SKBUILD_BUILD_DIR="build/older"
exec scripts/test.sh -m quick "$@"
