# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign model directories: each ends with a message that says what is wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

from tvm_pagedkv_lm import DecoderModel, config_from_fields
from tvm_pagedkv_lm.model.source import TINY

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    return folder


def _edit_config(directory, **fields) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _edit_tensors(directory, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def _message(directory, error=ValueError) -> str:
    with pytest.raises(error) as caught:
        DecoderModel.from_pretrained(directory)
    return str(caught.value)


def test_no_directory(tmp_path):
    message = _message(tmp_path / "nothing", FileNotFoundError)
    assert "nothing" in message and "a model is a Hugging Face directory" in message


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(directory, file):
    (directory / file).unlink()
    assert file in _message(directory, FileNotFoundError)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_file(directory, file):
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[: len(content) // 2])
    assert file in _message(directory)


def test_unknown_architecture(directory):
    _edit_config(directory, architectures=["GPT2LMHeadModel"])
    message = _message(directory)
    assert "GPT2LMHeadModel" in message and "LlamaForCausalLM" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, got '4'"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_kv_heads"),
        ({"head_dim": 36}, "must be a multiple of 8"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "needs factor, low_freq_factor"),
        ({"rope_parameters": 3}, "rope_parameters must be an object, got 3"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be a positive integer"),
    ],
)
def test_unsupported_fields(directory, fields, message):
    _edit_config(directory, **fields)
    assert message in _message(directory)


def test_missing_tensor(directory):
    _edit_tensors(directory, lambda tensors: tensors.pop(NORM))
    message = _message(directory)
    assert f"lacks tensor {NORM}" in message and "[192]" in message


def test_misshapen_tensor(directory):
    _edit_tensors(directory, lambda tensors: tensors.update({NORM: np.zeros(100, "float32")}))
    assert f"tensor {NORM} has shape [100]; expected [192]" in _message(directory)


def test_tensor_of_integers(directory):
    _edit_tensors(directory, lambda tensors: tensors.update({NORM: np.zeros(192, "int8")}))
    assert f"tensor {NORM} has type int8" in _message(directory)


def test_missing_shard(directory):
    (directory / "model.safetensors").unlink()  # which would be read without the index
    index = {"weight_map": {NORM: "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors" in _message(directory, FileNotFoundError)


def test_index_without_a_map(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in _message(directory)


def test_rope_fields_of_old_and_new_files():
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    new = config_from_fields(
        shape | {"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    )
    old = config_from_fields(
        shape | {"rope_theta": 5e5, "rope_scaling": llama3 | {"type": "llama3"}}
    )
    assert new == old
    (layer,) = new.cache_layers
    assert layer.rope.theta == 5e5 and layer.rope.scaling_dict["factor"] == 8.0
    assert new.num_kv_heads == 2 and new.head_dim == 32
    plain = config_from_fields(shape | {"rope_theta": 1e6, "rope_scaling": None})
    assert plain.cache_layers[0].rope.theta == 1e6 and plain.cache_layers[0].rope.scaling is None


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
