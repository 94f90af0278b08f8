# SPDX-License-Identifier: Apache-2.0
"""The parts of try_mlc.py and try_mlc_engine.py in scripts/tools that do without mlc-llm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "scripts" / "tools"


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


def test_a_row_says_what_the_steps_left(tmp_path, capsys):
    from mlc_trial.report import print_table

    folder = tmp_path / "llama"
    folder.mkdir()
    checked = {
        "ours": {"compile_s": 19.6, "errors": {"prefill": 3e-6, "tree": 8e-6}},
        "stock": {"compile_s": 15.3, "errors": {"fork": 0.5}, "failed": "TypeError: 16 arguments"},
    }
    (folder / "check.json").write_text(json.dumps(checked))
    (folder / "time.json").write_text(json.dumps({"batch": 1, "ms": {"ours": 2.0, "stock": 5.0}}))
    print_table(tmp_path, ["llama", "phi"])
    _, llama, phi = capsys.readouterr().out.splitlines()
    assert llama.split()[:8] == ["llama", "20", "15", "8e-06", "5e-01", "2.000", "5.000", "2.50"]
    assert "stock: TypeError: 16 arguments; stock wrong: fork 5.0e-01" in llama
    assert llama.endswith("timed with one sequence")
    assert phi.split() == ["phi", *"-------"]


def test_an_error_that_is_no_number_shows(tmp_path, capsys):
    from mlc_trial.report import print_table

    (tmp_path / "llama").mkdir()
    checked = {"ours": {"errors": {"prefill": 1e-6, "decode": float("nan")}}}
    (tmp_path / "llama" / "check.json").write_text(json.dumps(checked))
    print_table(tmp_path, ["llama"])
    assert "ours wrong: decode nan" in capsys.readouterr().out


def test_every_family_is_one_of_transformers():
    transformers = pytest.importorskip("transformers")
    from mlc_trial.families import FAMILIES

    for family in FAMILIES.values():
        config = transformers.AutoConfig.for_model(family.kind, **family.fields)
        assert config.vocab_size == family.vocab_size


def test_a_folder_that_is_no_clone(tmp_path):
    command = [sys.executable, "-m", "mlc_trial.trial", str(tmp_path), "llama", str(tmp_path)]
    done = subprocess.run([*command, "check"], cwd=TOOLS, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path} is no clone of mlc-llm" in done.stderr


def test_the_engine_needs_a_clone_with_its_submodules(tmp_path):
    command = [sys.executable, str(TOOLS / "try_mlc_engine.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path} is no clone of mlc-llm" in done.stderr
    passes = tmp_path / "python" / "mlc_llm" / "compiler_pass"
    passes.mkdir(parents=True)
    (passes / "dispatch_kv_cache_creation.py").touch()
    (tmp_path / "3rdparty" / "tvm" / "include").mkdir(parents=True)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "lacks the submodule 3rdparty/xgrammar" in done.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
