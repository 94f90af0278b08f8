# SPDX-License-Identifier: Apache-2.0
# Sourced with the extras to install as argument (. scripts/setup_venv.sh demo): creates .venv where
# it is missing, installs the project into it where its sources have changed, and activates it.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="$_root/.venv"
_extras="$1"

_sum() { # of the contents and names of the files under the given paths
  (cd "$_root" && find "$@" -type f ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 cksum | cksum)
}

_setup() {
  local python="${PYTHON:-python3}" sources wanted
  if [ ! -x "$_venv/bin/pip" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "Python 3.10 or newer is needed; set PYTHON to one" >&2
      return 1
    fi
    echo "creating $_venv" >&2
    "$python" -m venv "$_venv"
  fi
  sources="$(_sum pyproject.toml CMakeLists.txt tvm_pagedkv tir_kernels runtime_ext)"
  wanted="$(_sum pyproject.toml)"
  if [ "$(cat "$_venv/.sources" 2>/dev/null)" != "$sources" ] ||
    [ "$(cat "$_venv/.extras-$_extras" 2>/dev/null)" != "$wanted" ]; then
    echo "installing tvm_pagedkv[$_extras] into $_venv (a minute or two the first time)" >&2
    "$_venv/bin/python" -m pip install --disable-pip-version-check "$_root[$_extras]" >&2
    echo "$sources" >"$_venv/.sources"
    echo "$wanted" >"$_venv/.extras-$_extras"
  fi
}

if command -v flock >/dev/null; then # two commands at a time: one installs, the other waits
  mkdir -p "$_venv"
  exec 9>"$_venv/.lock"
  flock 9
  _setup
  exec 9>&-
else
  _setup
fi
. "$_venv/bin/activate"
