#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up in .venv and run all tests; arguments go to pytest: scripts/test.sh -k rope
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh test
exec python -m pytest tests -ra --durations=10 "$@"
