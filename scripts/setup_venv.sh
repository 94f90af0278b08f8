# SPDX-License-Identifier: Apache-2.0
# Sourced with the extras to install as argument (. scripts/setup_venv.sh demo): creates .venv if it
# is missing, installs the project into it if the sources have changed, and activates it. Prints one
# line per phase, and pip's last lines only if it fails.
#
# TVM_PAGEDKV_VENV names another folder than .venv, for another apache-tvm (scripts/test_older.sh).
#
# The C++ is built within .venv and stays in build/: other extras install packages only, and a
# changed Python file is copied only.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="${TVM_PAGEDKV_VENV:-$_root/.venv}"
_extras="$1"

_sum() { # of the contents and names of the files under the given paths
  (cd "$_root" && find "$@" -type f ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 cksum | cksum)
}

_requirements() { # what the build, the project and the extras need, a line each
  "$_venv/bin/python" - "$_root/pyproject.toml" "$_extras" <<'PYTHON'
import shutil
import sys

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    from pip._vendor import tomli as tomllib

settings = tomllib.loads(open(sys.argv[1], encoding="utf-8").read())
project = settings["project"]
own = project["name"] + "["


def requirements(names):
    for name in names.split(","):
        for line in project["optional-dependencies"][name]:
            if line.startswith(own):  # an extra that contains others
                yield from requirements(line[len(own) :].rstrip("]"))
            else:
                yield line


print(*settings["build-system"]["requires"], sep="\n")
print(*[tool for tool in ("cmake", "ninja") if shutil.which(tool) is None], sep="\n")
print(*project["dependencies"], *requirements(sys.argv[2]), sep="\n")
PYTHON
}

_pip() { # install; quiet unless it fails
  # Python compiles a module when it is first imported. Most of torch and transformers never is, and
  # pip takes half a minute to compile them.
  local log="$_venv/.pip.log"
  if ! "$_venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    --no-compile "$@" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: pip failed; all of its output is in $log" >&2
    return 1
  fi
}

_setup() {
  local python="${PYTHON:-python3}" sources wanted
  if [ ! -x "$_venv/bin/pip" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "Python 3.10 or newer is needed; set PYTHON to one" >&2
      return 1
    fi
    echo "setup: creating $_venv" >&2
    "$python" -m venv "$_venv"
  fi
  wanted="$(_requirements)" || return 1
  if [ "$(cat "$_venv/.requirements-$_extras" 2>/dev/null)" != "$wanted" ]; then
    echo "setup: installing what tvm_pagedkv[$_extras] needs" >&2
    _pip -r /dev/stdin <<<"$wanted" || return 1
    echo "$wanted" >"$_venv/.requirements-$_extras"
  fi
  sources="$(_sum pyproject.toml CMakeLists.txt tvm_pagedkv tvm_pagedkv_cli tir_kernels runtime_ext)"
  if [ "$(cat "$_venv/.sources" 2>/dev/null)" != "$sources" ]; then
    echo "setup: building and installing tvm_pagedkv (less than a minute)" >&2
    (cd "$_root" && PATH="$_venv/bin:$PATH" _pip --no-build-isolation --no-deps .) || return 1
    echo "$sources" >"$_venv/.sources"
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
