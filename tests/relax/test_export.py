# SPDX-License-Identifier: Apache-2.0
"""A model that was exported, run by a C++ program that has neither Python nor a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.cli import command as cli
from tvm_pagedkv_lm.model.source import TINY

from ..support.harness.cpp_build import BUILDS, ROOT, needs_cmake, run

NUM_TOKENS = 40
PROMPTS = ["The with statement", "A list is", "x", "The yield expression is used when defining"]


def exported(folder: Path, *options: str) -> Path:
    """A folder written by the command, and moved since."""
    assert cli.main(["export", "--out", str(folder / "new"), *options]) == 0
    return (folder / "new").rename(folder / "moved")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def program(folder) -> str:
    build = BUILDS / "run_model"
    source = ROOT / "runtime_ext" / "example"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", str(source), "-B", str(build), f"-DBUNDLE={folder}", python)
    run("cmake", "--build", str(build), "--target", "run_model")
    return str(build / "run_model")


def most_likely(model: DecoderModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the model's texts in Python, with a new cache for each prompt."""
    texts = []
    for prompt in prompts:
        cache = model.create_cache(1, 256)
        text = []
        for _ in range(NUM_TOKENS):
            cache.clear()
            cache.add_sequence(0)
            token = int(model.prefill(cache, [0], [prompt + text])[0].argmax())
            if token in model.config.eos_token_ids:
                break
            text.append(token)
        texts.append(text)
    return texts


def continued(program: str, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    arguments = [",".join(map(str, prompt)) for prompt in prompts]
    lines = run(program, str(folder), str(NUM_TOKENS), *arguments, env={"TVM_NUM_THREADS": "2"})
    return [[int(token) for token in line.split(",") if token] for line in lines.splitlines()]


@needs_cmake
def test_a_batch_of_tokens(program, folder):
    model = DecoderModel.from_pretrained()
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    texts = continued(program, folder, prompts)
    assert texts == most_likely(model, prompts)
    assert min(map(len, texts)) > 0


@needs_cmake
def test_who_has_come_to_an_end_leaves_the_batch(program, tmp_path):
    """Full stops, which some of the texts contain, end a text."""
    model = DecoderModel.from_pretrained()
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    config = json.loads((source / "config.json").read_text())
    config["eos_token_id"] = model.tokenizer.encode(".").ids[-1]
    (source / "config.json").write_text(json.dumps(config))
    changed = DecoderModel.from_pretrained(source)
    expected = most_likely(changed, prompts)
    assert 0 < min(map(len, expected)) < max(map(len, expected)) == NUM_TOKENS
    assert continued(program, exported(tmp_path, "--model", str(source)), prompts) == expected


def test_weights_are_written_as_they_are(folder):
    tvm.get_global_func("vm.builtin.tensor_cache.load")(str(folder / "weights"), 1, 0)
    loaded = tvm.get_global_func("vm.builtin.param_array_from_cache")("weight", -1)
    tvm.get_global_func("vm.builtin.tensor_cache.clear")()
    model = DecoderModel.from_pretrained()
    assert len(loaded) == len(model.parameters)
    for ours, theirs in zip(model.parameters, loaded, strict=True):
        assert theirs.dtype == ours.dtype
        np.testing.assert_array_equal(theirs.numpy(), ours.numpy())


@needs_cmake
def test_mistakes_are_told(program, folder, tmp_path, capsys):
    for arguments, status, text in (
        ((), 2, "use: run_model FOLDER NUM_TOKENS PROMPT"),
        ((str(folder), "5", "1,x"), 2, "use: run_model"),
        ((str(tmp_path), "5", "1"), 1, "cannot load"),
        ((str(folder), "-1", "1"), 2, "use: run_model"),
        ((str(folder), "5", "1,1000000"), 1, "the model has no token 1000000"),
    ):
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert done.returncode == status, done
        assert text in done.stderr
    without = dict(os.environ, TVM_PAGEDKV_CPU_FEATURES="")
    arguments = [program, str(folder), "5", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=without)
    if json.loads((folder / "manifest.json").read_text())["targets"][0]["features"]:
        assert done.returncode == 1 and "cannot run the bundle's kernels" in done.stderr
    (tmp_path / "file").touch()
    assert cli.main(["export", "--out", str(tmp_path)]) == 2
    assert "needs a folder of its own" in capsys.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
