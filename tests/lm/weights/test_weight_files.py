# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are the weights: those that transformers reads, whatever is there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from tvm_pagedkv_lm.model.source import TINY, HuggingFaceModel  # noqa: E402

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def write(file: Path, value: float, names=None) -> None:
    """Write the tensors of the small model, or some of them, with one value everywhere."""
    tensors = load_file(TINY / ONE)
    chosen = {name: np.full_like(tensors[name], value) for name in names or tensors}
    save_file(chosen, file, {"format": "pt"})


def write_shards(folder: Path, value: float, with_index: bool = True) -> None:
    """Write the tensors as two shards in place of one file."""
    names = sorted(load_file(TINY / ONE))
    parts = names[:5], names[5:]
    for shard, part in zip(SHARDS, parts, strict=True):
        write(folder / shard, value, part)
    (folder / ONE).unlink(missing_ok=True)
    if with_index:
        weight_map = {n: shard for shard, part in zip(SHARDS, parts, strict=True) for n in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values(folder: Path) -> set[float]:
    """Return the values of all tensors that are read."""
    tensors = HuggingFaceModel(folder).tensors()
    shapes = {name: each.shape for name, each in load_file(TINY / ONE).items()}
    assert set(tensors.names()) == set(shapes)
    return {float(x) for name in shapes for x in np.unique(tensors.read(name, shapes[name]))}


def theirs(folder: Path) -> set[float]:
    """Return the values of all tensors that transformers reads."""
    state = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    return {float(x) for each in state.values() for x in each.unique()}


def check(folder: Path, value: float) -> None:
    assert values(folder) == theirs(folder) == {value}


def error_of(folder: Path, kind=FileNotFoundError) -> str:
    with pytest.raises(kind) as caught:
        HuggingFaceModel(folder).tensors()
    return str(caught.value)


def test_a_file_precedes_the_index_of_older_shards(folder):
    write_shards(folder, 1.0)
    check(folder, 1.0)
    write(folder / ONE, 2.0)
    check(folder, 2.0)
    (folder / SHARDS[0]).unlink()
    assert values(folder) == {2.0}


def test_other_files_are_not_weights(folder):
    write(folder / ONE, 1.0)
    for name in (
        "adapter_model", "consolidated", "model_ema", "model.fp16", "optimizer", "pytorch_model",
        "model-00001-of-00001", "training_args", "zzz",
    ):  # fmt: skip
        write(folder / f"{name}.safetensors", 2.0)
    write(folder / "optimizer.safetensors", 2.0, [NORM])
    (folder / "checkpoint-500").mkdir()
    write(folder / "checkpoint-500" / ONE, 3.0)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    check(folder, 1.0)
    write_shards(folder, 4.0)  # in place of the single file
    check(folder, 4.0)


def test_shards_without_an_index(folder):
    write_shards(folder, 1.0, with_index=False)
    assert values(folder) == {1.0}
    write(folder / "model-00001-of-00003.safetensors", 2.0)
    assert "has no weights by their usual names" in error_of(folder)
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / SHARDS[0]).unlink()
    assert error_of(folder).endswith(f"1 of the 2 files that have its weights: {SHARDS[0]}")


def test_the_only_file(folder):
    write(folder / ONE, 1.0)
    (folder / ONE).rename(folder / "model.fp16.safetensors")
    assert values(folder) == {1.0}
    (folder / "model.fp16.safetensors").rename(folder / SHARDS[0])
    assert SHARDS[1] in error_of(folder)


def test_the_file_that_the_configuration_names(folder):
    write(folder / "other.safetensors", 1.0)
    config = json.loads((folder / "config.json").read_text())

    def name(file) -> None:
        text = json.dumps(config | {"transformers_weights": file})
        (folder / "config.json").write_text(text)

    name("other.safetensors")
    check(folder, 1.0)
    for file in ("../model/other.safetensors", "pytorch_model.bin", 3):
        name(file)
        assert "transformers_weights must be" in error_of(folder, ValueError)


def test_tensors_of_several_shards(folder):
    write_shards(folder, 1.0)
    write(folder / SHARDS[0], 1.0)  # has the tensors of both
    check(folder, 1.0)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][NORM]  # a shard may have more than its index says
    (folder / INDEX).write_text(json.dumps(index))
    check(folder, 1.0)
    write(folder / SHARDS[0], 2.0)
    assert "has other values in another file" in error_of(folder, ValueError)


def test_an_index_without_shards(folder):
    (folder / ONE).unlink()
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": []}'):
        (folder / INDEX).write_text(text)
        assert f"{INDEX} has no weight_map" in error_of(folder, ValueError)
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert f"{INDEX} has a twice: 'x.safetensors' and" in error_of(folder, ValueError)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}',
          "adapter_model.safetensors": ""}, "is a PEFT adapter of org/base, not a model; merge"),
        ({"params.json": "{}", "consolidated.safetensors": ""}, "Mistral's or Meta's own format"),
        ({"params.json": "{}", "consolidated.00.pth": ""}, "Mistral's or Meta's own format"),
        ({"pytorch_model.bin": ""}, "as pickled PyTorch tensors (pytorch_model.bin), which may"),
        ({"pytorch_model-00001-of-00002.bin": "", "pytorch_model.bin.index.json": "{}"},
         "as pickled PyTorch tensors (pytorch_model-00001-of-00002.bin)"),
        ({"model.fp16.safetensors": "", "optimizer.safetensors": ""},
         "has no weights by their usual names; expected model.safetensors, or"),
        ({"checkpoint-500/model.safetensors": ""}, "its folder checkpoint-500 has some"),
        ({}, "has no tensors; expected model.safetensors, or model.safetensors.index.json"),
    ],
    ids=str,
)  # fmt: skip
def test_folders_without_weights(folder, files, message):
    (folder / ONE).unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert message in error_of(folder)


def test_an_adapter_beside_a_model_is_told(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="beside a PEFT adapter, which is not applied"):
        HuggingFaceModel(folder).tensors()


def test_folders_of_adapters_have_no_configuration(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(FileNotFoundError, match="is a PEFT adapter, not a model"):
        HuggingFaceModel(tmp_path).config()


def test_links_as_in_the_cache_of_the_hub(folder, tmp_path):
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    write(folder / ONE, 1.0)
    (folder / ONE).rename(blob)
    (folder / ONE).symlink_to(os.path.relpath(blob, folder))
    check(folder, 1.0)
    blob.unlink()
    assert error_of(folder).endswith(f"1 of the 1 files that have its weights: {ONE}")


def test_pointers_of_git_lfs(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (folder / ONE).write_text(pointer)
    assert "is a pointer to a file in Git LFS" in error_of(folder, ValueError)
    (folder / "tokenizer.json").write_text(pointer)
    with pytest.raises(ValueError, match="tokenizer.json is a pointer to a file in Git LFS"):
        HuggingFaceModel(folder).tokenizer()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
