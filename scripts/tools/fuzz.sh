#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the fuzz targets and run one: scripts/tools/fuzz.sh sequence_table [seconds = 60] [seed]
# At the end it prints how many inputs and operations it has run.
# An input that ends the process is kept in build/fuzz/crashes; to run it again:
# build/fuzz/fuzz_sequence_table build/fuzz/crashes/crash-...
set -euo pipefail
cd "$(dirname "$0")/../.."
targets=$(cd runtime_ext/fuzz && ls fuzz_*.cc | sed 's/^fuzz_//; s/\.cc$//' | tr '\n' ' ')
target="fuzz_${1:-}"
if [ ! -f "runtime_ext/fuzz/$target.cc" ]; then
  echo "usage: scripts/tools/fuzz.sh TARGET [seconds] [seed]; targets: $targets" >&2
  exit 2
fi
seconds="${2:-60}"
seed="${3:-$RANDOM}"
crashes=build/fuzz/crashes
mkdir -p "$crashes"
compiler="$(command -v clang++ || command -v g++)"
cmake -S . -B build/fuzz -DTVM_PAGEDKV_BUILD_FUZZERS=ON -DCMAKE_CXX_COMPILER="$compiler" >/dev/null
cmake --build build/fuzz --target "$target" --parallel "$(nproc)" >/dev/null
case "$compiler" in
  *clang++) exec "build/fuzz/$target" -max_total_time="$seconds" -seed="$seed" -max_len=512 \
    -artifact_prefix="$crashes/" ;;
  *) exec "build/fuzz/$target" --seconds="$seconds" --seed="$seed" --save="$crashes" ;;
esac
