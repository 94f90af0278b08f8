#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up in .venv and generate text: scripts/generate.sh "The with statement"
# All arguments go to `tvm-pagedkv generate`; see scripts/generate.sh --help.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh" demo
exec tvm-pagedkv generate "$@"
