#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv and run the tests, one worker per CPU. `--all`, given first, adds the long runs and
# compiles all kernels as users do.
# Other arguments go to pytest: scripts/test.sh -k rope; scripts/test.sh -m quick;
# scripts/test.sh tests/cache -n 0 --pdb
set -euo pipefail
cd "$(dirname "$0")/.."
selection=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  selection=(--optimized)
  shift
fi
. scripts/setup_venv.sh test
# Each worker starts with a run of neighbours, which use the same compiled kernels.
exec python -m pytest -ra --durations=10 -n auto --maxprocesses=8 --dist=worksteal \
  "${selection[@]}" "$@"
