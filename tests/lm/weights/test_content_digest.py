# SPDX-License-Identifier: Apache-2.0
"""Names of models: by content alone, so that no text of one model is taken for another's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("gguf")

from safetensors.numpy import load_file, save_file

from tvm_pagedkv_lm import DecoderModel, fingerprint
from tvm_pagedkv_lm.model.source import TINY, open_model
from tvm_pagedkv_lm.weights.content_digest import _WHOLE_BYTES, content_digest

from ...support.cases.models.gguf_cases import write_gguf


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def names(model: Path) -> tuple[str, str]:
    source = open_model(model)
    assert source.fingerprint() == fingerprint(model) and len(fingerprint(model)) == 64
    return source.content_digest(), source.fingerprint()


def test_copies_have_the_same_name(folder):
    expected = names(TINY)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    (folder / "README.md").write_text("x")
    save_file({"x": np.zeros(3, "float32")}, folder / "optimizer.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    assert names(folder) == expected == names(TINY)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer_config.json", "{}"),
        ("special_tokens_map.json", "{}"),
        ("added_tokens.json", "{}"),
        ("chat_template.jinja", "x"),
    ],
)
def test_what_decides_the_tokens_of_a_text(file, content, folder):
    text = (folder / file).read_text() + "\n" if content is None else content
    (folder / file).write_text(text)
    (weights, whole), (before, whole_before) = names(folder), names(TINY)
    assert weights == before and whole != whole_before


def test_a_tensor_of_a_large_file(tmp_path):
    """The beginning of any tensor and what lies between spaced blocks, in a file of 40 MB."""
    shutil.copy(TINY / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"t{i:03}": np.zeros(100, "float32") for i in range(200)}
    tensors["large"] = np.zeros((1000, 10_000), "float32")
    found = set()
    for name in (None, "t000", "t123", "t199", "large"):
        changed = {} if name is None else {name: tensors[name] + 1}
        save_file(tensors | changed, file)
        assert file.stat().st_size > 4 * _WHOLE_BYTES
        os.utime(file, ns=(1, 1))
        found.add(names_without_tokenizer(tmp_path))
    assert len(found) == 5
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert names_without_tokenizer(tmp_path) not in found


def names_without_tokenizer(folder: Path) -> str:
    return open_model(folder).content_digest()


def test_it_reads_little_of_many_files(tmp_path, monkeypatch):
    files = {}
    for i in range(64):
        file = tmp_path / f"{i}"
        with file.open("wb") as stream:
            stream.truncate(_WHOLE_BYTES * 4)  # sparse
        files[file] = range(0, _WHOLE_BYTES, 512)
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args[1]) or pread(*args))
    digest = content_digest(files)
    assert sum(reads) < 32 << 20
    (tmp_path / "63").write_bytes(b"")
    assert content_digest(files) != digest and content_digest({}) != digest


def test_gguf_files(tmp_path, folder):
    one = write_gguf(folder, tmp_path / "a.gguf")
    other_time = shutil.copy(one, tmp_path / "b.gguf")
    os.utime(other_time, ns=(1, 1))
    assert names(one) == names(Path(other_time))
    tensors = load_file(folder / "model.safetensors")
    norm = "model.layers.2.input_layernorm.weight"
    save_file(tensors | {norm: tensors[norm][::-1].copy()}, folder / "model.safetensors")
    changed = write_gguf(folder, tmp_path / "c.gguf")
    assert changed.stat().st_size == one.stat().st_size
    shutil.copystat(one, changed)
    assert not {*names(one)} & {*names(changed)}


def test_it_is_the_name_of_what_was_loaded(folder):
    model = DecoderModel.from_pretrained(folder)
    expected = names(folder)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"a": "b"})
    assert (model.content_digest, model.fingerprint) == expected != names(folder)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
