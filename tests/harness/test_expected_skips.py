# SPDX-License-Identifier: Apache-2.0
"""Continuous integration fails on skips that nobody has listed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.harness.expected_skips import EXPECTED, is_expected

ROOT = Path(__file__).parents[2]
PASSING = "def test_it(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no such machine')\ndef test_NAME(): pass\n"
LISTED = """
import pytest
@pytest.mark.skip(reason="no such instructions")
@pytest.mark.parametrize("what", ["float16-x86-64-v4"])
def test_other_instruction_sets(what): pass
"""
LISTED_FILE = "kernels/test_attention_kernels.py"


def run_tests(folder: Path, files: dict[str, str], *options: str, ci: str = "true"):
    """Run pytest over some files in a folder of their own; its exit status and output."""
    for name, text in files.items():
        file = folder / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    plugin = "tests.support.harness.expected_skips"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "tests", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_skip_that_is_not_listed_fails_the_run(tmp_path, options):
    files = {
        "test_here.py": PASSING + SKIPPED.replace("NAME", "there"),
        "test_file.py": "import pytest\npytest.importorskip('no_such_module')\n" + PASSING,
        LISTED_FILE: LISTED,
    }
    status, output = run_tests(tmp_path, files, *options)
    assert status == 1
    assert "tests/test_here.py::test_there: Skipped: no such machine" in output
    assert "tests/test_file.py: Skipped: could not import 'no_such_module'" in output
    assert "The run fails: a skipped test proves nothing." in output
    assert "test_other_instruction_sets[float16-x86-64-v4]:" not in output
    assert "1 passed, 3 skipped" in output


def test_listed_skips_and_other_runs_pass(tmp_path):
    files = {LISTED_FILE: PASSING + LISTED}
    status, output = run_tests(tmp_path, files)
    assert status == 0 and "unexpected skips" not in output
    files["test_here.py"] = SKIPPED.replace("NAME", "there")
    (tmp_path / "other").mkdir()
    status, output = run_tests(tmp_path / "other", files, ci="")
    assert status == 0 and "unexpected skips" not in output


def test_failures_are_not_hidden(tmp_path):
    files = {"test_here.py": "def test_it(): assert 0\n" + SKIPPED.replace("NAME", "there")}
    status, output = run_tests(tmp_path, files)
    assert status == 1 and "1 failed, 1 skipped" in output and "unexpected skips" in output


@pytest.mark.parametrize("pattern", EXPECTED)
def test_listed_tests_exist(pattern):
    file, _, name = pattern.partition("::")
    source = (ROOT / file).read_text()
    assert f"def {name.split('*')[0]}(" in source if name else "importorskip" in source


def test_patterns_name_no_more_than_they_should():
    file = "tests/kernels/test_attention_kernels.py::test_other_instruction_sets"
    assert is_expected(f"{file}[seed0-float16-x86-64-v4]")
    assert not is_expected(f"{file}[seed0-float16-x86-64-v3]")
    assert not is_expected(f"{file}[seed0-float32-x86-64]")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
