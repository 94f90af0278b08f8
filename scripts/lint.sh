#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, format and type checks with pinned versions; `scripts/lint.sh --fix` repairs what it can.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh test
mapfile -t cpp < <(git ls-files '*.cc' '*.h')
if [ "${1:-}" = "--fix" ]; then
  ruff check --fix .
  ruff format .
  clang-format -i "${cpp[@]}"
else  # a line each: a failure within a list of && does not end the script
  ruff check .
  ruff format --check .
  clang-format --dry-run --Werror "${cpp[@]}"
fi
mypy --no-error-summary
echo "lint: ok (${#cpp[@]} C++ files, $(git ls-files '*.py' | wc -l) Python files)"
