# SPDX-License-Identifier: Apache-2.0
"""The README's command for the main job, from a clean clone with nothing installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # sets up a virtual environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to clone")
    folder = tmp_path_factory.mktemp("clone") / "tvm_pagedkv"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def _environment(clone: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["TVM_PAGEDKV_CACHE"] = str(clone.parent / "compiled")
    environment["TVM_PAGEDKV_MODELS"] = str(clone.parent / "models")
    # The library is that of the tests in less time: they have been set up by the same script.
    environment["CMAKE_ARGS"] = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
    return environment


def _generate(clone: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Run the script; `more` are environment variables."""
    return subprocess.run(
        [str(clone / "scripts" / "generate.sh"), *arguments],
        cwd=clone.parent,
        env=_environment(clone) | more,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_generate_from_a_clean_clone(clone):
    arguments = ("The with statement", "--model", "tiny", "--max-tokens", "48", "--seed", "1")
    first = _generate(clone, *arguments)
    assert first.returncode == 0, first.stderr
    assert "The with statement" in first.stdout
    text = first.stdout.split("The with statement", 1)[1]
    assert len(re.findall(r"[a-z]{2,}", text)) >= 4, text
    second = _generate(clone, *arguments)
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[0] == first.stdout.splitlines()[0]
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert status.stdout == "", "the commands leave files behind"


def test_the_first_command_of_the_readme(clone):
    """It answers with a real model, which the package index has."""
    result = _generate(clone, "--chat", "What is the capital of France?")
    assert result.returncode == 0, result.stderr
    if "it cannot be downloaded" in result.stderr:
        assert "using the tiny included model" in result.stderr
        pytest.skip("SmolLM2 cannot be downloaded")
    assert "The capital of France is Paris." in result.stdout


@pytest.fixture
def silent_index(clone, tmp_path):
    """Variables for an index that takes connections and never answers, and no earlier download."""
    _generate(clone, "--help")  # installs, where no test has done so
    (clone / ".venv" / ".downloaded").unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DEFAULT_TIMEOUT": "3",
            "TVM_PAGEDKV_MODELS": str(tmp_path),
        }


def test_without_the_index_the_tiny_model_writes(clone, silent_index):
    start = time.monotonic()
    result = _generate(clone, "The with statement", "--max-tokens", "4", **silent_index)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The with statement")
    assert "it cannot be downloaded" in result.stderr
    assert result.stderr.count("using the tiny included model") == 1
    assert time.monotonic() - start < 120


def test_ctrl_c_during_the_download_ends_the_script(clone, silent_index):
    process = subprocess.Popen(
        [str(clone / "scripts" / "generate.sh"), "The with statement", "--max-tokens", "4"],
        cwd=clone.parent,
        env=_environment(clone) | silent_index | {"PIP_DEFAULT_TIMEOUT": "60"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while "downloading" not in process.stderr.readline():
        assert process.poll() is None
    while not list(Path(silent_index["TVM_PAGEDKV_MODELS"]).glob(".download-*")):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, error = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), error
    assert out == "" and "tiny" not in error and "Traceback" not in error
    assert not (clone / ".venv" / ".downloaded").exists(), "the next run downloads"


def test_mistakes_end_with_a_sentence(clone):
    result = _generate(clone, "text", "--model", "no/such/folder")
    assert result.returncode == 2
    assert "no/such/folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_wheel_has_all_that_an_installation_needs(clone):
    """The wheel that pip has built and installed for the commands above, by its own record."""
    _generate(clone, "--help")  # installs, where no test has done so
    (record,) = clone.glob(".venv/lib/python*/site-packages/tvm_pagedkv-*.dist-info/RECORD")
    names = {line.split(",")[0] for line in record.read_text().splitlines()}
    assert {
        "tvm_pagedkv/libtvm_pagedkv.so",
        "tvm_pagedkv_lm/tiny/model.safetensors",
        "tvm_pagedkv_lm/cli/command.py",
        "tvm_pagedkv/py.typed",
        "tir_kernels/cpu/attention/decode.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "runtime_ext/"))]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
