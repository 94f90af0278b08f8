#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up in .venv and run all tests, a worker for each CPU; arguments go to pytest:
# scripts/test.sh -k rope; scripts/test.sh -n 0 --pdb
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh test
# Each worker begins with a run of neighbours, which use the same compiled kernels.
exec python -m pytest tests -ra --durations=10 -n auto --maxprocesses=8 --dist=worksteal "$@"
