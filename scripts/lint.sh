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
fi
mypy --no-error-summary & types=$!
failed=0
if [ "${1:-}" != "--fix" ]; then
  ruff check . || failed=1
  ruff format --check . || failed=1
  printf '%s\0' "${cpp[@]}" |
    xargs -0 -n 20 -P "$(getconf _NPROCESSORS_ONLN)" clang-format --dry-run --Werror || failed=1
fi
wait "$types" || failed=1
[ "$failed" = 0 ]
echo "lint: ok (${#cpp[@]} C++ files, $(git ls-files '*.py' | wc -l) Python files)"
