#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up in .venv and build the documentation into site/; a warning is an error.
# scripts/docs.sh serve shows it on a local port while pages are edited.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh docs
export NO_MKDOCS_2_WARNING=true # mkdocs-material's notice about another project
if [ "${1:-build}" = "serve" ]; then
  exec mkdocs serve
fi
mkdocs build --strict --quiet
echo "docs: ok (site/index.html)"
