# SPDX-License-Identifier: Apache-2.0
"""The tool that compares the structure of kernels notices a change, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm
import tvm_ffi

import tir_kernels
from tir_kernels.semantics import softmax

TOOLS = Path(__file__).resolve().parents[2] / "scripts" / "tools"
ONLY = ["--only", "narrow-heads", "--processes", "1"]


@pytest.fixture
def tool(monkeypatch):
    """A function that runs the tool and returns its exit status."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import kernel_hashes

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["kernel_hashes.py", *arguments])
        try:
            kernel_hashes.main()
        except SystemExit as end:
            return int(end.code)
        return 0

    return run


def test_a_change_is_noticed(tool, tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "hashes.json")
    assert tool("record", file, *ONLY) == 0
    assert len(json.loads(Path(file).read_text())) == 35
    assert tool("compare", file, *ONLY) == 0
    monkeypatch.setattr(softmax, "_FAR", -100.0)
    capsys.readouterr()
    assert tool("compare", file, *ONLY) == 1
    changed = {
        line.split(":")[0].split("/")[1] for line in capsys.readouterr().out.split("\n")[:-2]
    }
    assert {"merge", "apply_sinks", "prefill_shared"} == changed


def test_norms_of_language_models_have_hashes(tool, tmp_path):
    file, only = tmp_path / "hashes.json", ["--only", "lm-", "--kernel", "norm-1024"]
    assert tool("record", str(file), *only, "--processes", "1") == 0
    found = json.loads(file.read_text())
    assert "lm-avx2/norm-1024-bfloat16" in found and "lm-cuda/norm-1024-float32" in found
    assert not [value for value in found.values() if value.endswith("Error")]


@pytest.mark.parametrize("spec", ["cpu-narrow-heads", "cuda-narrow-heads"])
def test_names_do_not_count_in_code(tool, tmp_path, monkeypatch, spec):
    file, only = str(tmp_path / "hashes.json"), ["--only", spec, "--processes", "1"]
    only += ["--kernel", "merge", "--level", "code"]
    assert tool("record", file, *only) == 0
    assert list(json.loads(Path(file).read_text())) == [f"{spec}/merge"]
    monkeypatch.setattr(softmax, "_FAR", -100.0)
    assert tool("compare", file, *only) == 1
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(TOOLS))
    real = tir_kernels.build_kernel

    def renamed(name, spec):
        function, other = real(name, spec), {}

        def note(loop: tvm.tirx.For) -> None:
            other[loop.loop_var] = tvm.tirx.Var("other", loop.loop_var.ty)

        tvm_ffi.structural_walk(function.body, (tvm.tirx.For, note))
        assert other
        body = tvm_ffi.structural_mutate(
            function.body, (tvm.ir.Var, lambda variable, _: other.get(variable, variable))
        )
        return function.with_body(body)

    monkeypatch.setattr(tir_kernels, "build_kernel", renamed)
    assert tool("compare", file, *only) == 0


def test_a_missing_kernel_is_noticed(tool, tmp_path, capsys):
    file = tmp_path / "hashes.json"
    assert tool("record", str(file), *ONLY) == 0
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"cpu-narrow-heads/lost": "0"}))
    assert tool("compare", str(file), *ONLY) == 1
    assert "cpu-narrow-heads/lost: 0 -> missing" in capsys.readouterr().out


def test_it_shows_kernels(tool, capsys):
    assert tool("show", "-", "--only", "cuda-narrow-heads", "--kernel", "merge") == 0
    assert "# cuda-narrow-heads/merge" in capsys.readouterr().out


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
