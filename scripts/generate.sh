#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up in .venv and generate text: scripts/generate.sh "The with statement"
# All arguments go to `tvm-pagedkv generate`; see scripts/generate.sh --help. Without --model, the
# first run downloads SmolLM2-135M-Instruct; if it cannot, the tiny included model writes the text.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh" demo
tried="$VIRTUAL_ENV/.downloaded" # once: without the index, every attempt waits for it
if [[ " $* " != *" --model"* && " $* " != *" --help "* && ! -e "$tried" ]]; then
  echo "setup: downloading SmolLM2-135M-Instruct (93 MB)" >&2
  status=0
  tvm-pagedkv download >"$VIRTUAL_ENV/.download.log" 2>&1 || status=$?
  [[ $status != 130 ]] || exit 130 # Ctrl-C
  [[ $status == 0 ]] ||
    echo "setup: it cannot be downloaded; the reasons are in $VIRTUAL_ENV/.download.log" >&2
  touch "$tried"
fi
exec tvm-pagedkv generate "$@"
