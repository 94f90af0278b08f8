# SPDX-License-Identifier: Apache-2.0
# Sourced with the extras to install as argument (. scripts/setup_venv.sh demo): creates .venv if it
# is missing, installs the project into it if the sources have changed, and activates it. Prints one
# line per phase, and pip's last lines only if it fails.
#
# TVM_PAGEDKV_VENV names another folder than .venv, for another apache-tvm (scripts/test_older.sh). It
# takes the packages of the extras from .venv if that has them.
#
# The C++ is built within .venv while the extras are installed, and stays in build/: other extras
# install packages only, and a changed Python file is copied only.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="${TVM_PAGEDKV_VENV:-$_root/.venv}"
_extras="$1"

# Where Python may write no bytecode beside the sources, it goes to build/. Without any, every process
# compiles what it imports: a second or more for TVM, in hundreds of tests.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$_root/build/pycache}"
fi

_sum() { # of the contents and names of the files under the given paths
  (cd "$_root" && find "$@" -type f ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 cksum | cksum)
}

_requirements() { # of the build and the project ("base"), or of the extras ("extras"), a line each
  "$_venv/bin/python" - "$_root/pyproject.toml" "$_extras" "$1" <<'PYTHON'
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


extras = list(requirements(sys.argv[2]))
# Where an extra contains a tool of the build, the build must not find it half installed.
tools = [tool for tool in ("cmake", "ninja") if tool in extras or shutil.which(tool) is None]
if sys.argv[3] == "base":
    print(*settings["build-system"]["requires"], *project["dependencies"], *tools, sep="\n")
else:
    print(*[line for line in extras if line not in tools], sep="\n")
PYTHON
}

# A shell lets its background jobs ignore Ctrl-C.
_pip_main='import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("pip", run_name="__main__")'

_pip() { # install; quiet unless it fails. The first argument names the log.
  # Python compiles a module when it is first imported. Most of torch and transformers never is, and
  # pip takes half a minute to compile them.
  local log="$_venv/.pip-$1.log"
  if ! "$_venv/bin/python" -c "$_pip_main" install --disable-pip-version-check --progress-bar off \
    --no-compile "${@:2}" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: pip failed; all of its output is in $log" >&2
    return 1
  fi
}

_install() { # the requirements of one kind, unless they are what they were
  local wanted kept="$_venv/.requirements-$1-$_extras"
  wanted="$(_requirements "$1")" || return 1
  if [ "$(cat "$kept" 2>/dev/null)" != "$wanted" ]; then
    echo "setup: installing $2" >&2
    _pip "$1" -r /dev/stdin <<<"$wanted" || return 1
    echo "$wanted" >"$kept"
  fi
}

_share() { # the packages that .venv has and this environment, which comes first, has not
  local shared="$_root/.venv" path='import sysconfig; print(sysconfig.get_path("purelib"))' own
  own="$("$_venv/bin/python" -c "$path")/shared.pth"
  if [ "$_venv" != "$shared" ] && [ -e "$shared/.requirements-extras-$_extras" ]; then
    "$shared/bin/python" -c "$path" >"$own"
  elif [ -e "$own" ]; then # .venv is gone, and what was taken from it
    rm -f "$own" "$_venv"/.requirements-extras-*
  fi
}

_build() { # the project itself, if its sources have changed
  local sources
  sources="$(_sum pyproject.toml CMakeLists.txt tvm_pagedkv tvm_pagedkv_lm tir_kernels runtime_ext)"
  if [ "$(cat "$_venv/.sources" 2>/dev/null)" != "$sources" ]; then
    echo "setup: building and installing tvm_pagedkv (less than a minute)" >&2
    (cd "$_root" && PATH="$_venv/bin:$PATH" _pip build --no-build-isolation --no-deps .) || return 1
    echo "$sources" >"$_venv/.sources"
  fi
}

_setup() {
  local python="${PYTHON:-python3}" build
  if [ ! -x "$_venv/bin/pip" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "Python 3.10 or newer is needed; set PYTHON to one" >&2
      return 1
    fi
    echo "setup: creating $_venv" >&2
    "$python" -m venv "$_venv"
  fi
  _install base "what the build needs" || return 1
  _share || return 1
  _build &
  build=$!
  _install extras "what tvm_pagedkv[$_extras] needs" || {
    wait "$build"
    return 1
  }
  wait "$build"
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
