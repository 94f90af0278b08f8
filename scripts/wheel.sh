#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build a wheel with a manylinux tag in dist/ (or the folder given), and try it in a clean virtual
# environment whose PATH has no compiler. The wheel finds TVM's libraries in the apache-tvm wheels,
# and asks for the series of apache-tvm that it is built for, which its build tag names as well.
set -euo pipefail
cd "$(dirname "$0")/.."
out="$(realpath -m "${1:-dist}")"
. scripts/setup_venv.sh wheel
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "wheel: building" >&2
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/built" . \
  >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
echo "wheel: checking what it links to" >&2
auditwheel repair --exclude 'libtvm*.so' --wheel-dir "$out" "$work"/built/*.whl \
  >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
wheel="$(python scripts/tools/tag_wheel.py "$(ls -t "$out"/tvm_pagedkv-*manylinux*.whl | head -n 1)")"

echo "wheel: trying $(basename "$wheel") without a compiler" >&2
tvm-pagedkv bundle --out "$work/bundle" --config scripts/tools/wheel_config.json 2>"$work/log" ||
  { tail -n 20 "$work/log" >&2; exit 1; }
python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel" \
  >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
cp scripts/tools/try_wheel.py "$work"
(cd "$work" && env -i PATH="$work/venv/bin" HOME="$work" python -I try_wheel.py bundle)
echo "$wheel"
