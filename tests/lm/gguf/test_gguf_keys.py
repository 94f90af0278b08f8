# SPDX-License-Identifier: Apache-2.0
"""Keys of GGUF files: those that change nothing, and those that are refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.model.source import open_model

from ...support.cases.models.gguf_cases import write_gguf
from ...support.cases.models.gguf_families import CASES, SHAPE
from ...support.cases.models.model_cases import write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", SHAPE)
    return folder


# Keys of published files that say nothing new, by the case whose file gets them.
NEUTRAL = {
    "llama": {
        ".tensor_data_layout": "Meta AI original pth",
        ".rope.scale_linear": 1.0,
        ".rope.scaling.type": "linear",
        ".rope.scaling.finetuned": False,
        ".rope.scaling.yarn_ext_factor": 0.5,
        ".attention.layer_norm_epsilon": 1e-5,
        ".attention.sliding_window": 1 << 20,
        ".attention.sliding_window_pattern": [False, False],
        ".attention.scale": 0.25,
        ".attention.head_count": [4, 4],
        ".attention.head_count_kv": [2, 2],
        ".feed_forward_length": [80, 80],
        ".logit_scale": 1.0,
        ".expert_count": 0,
        ".expert_used_count": 0,
        ".expert_feed_forward_length": 48,
        ".vocab_size": 300,
        "general.file_type": 2,
        "quantize.imatrix.chunks_count": 7,
        "split.count": 1,
        "tokenizer.chat_template.tool_use": "{{ x }}",
        "general.type": "model",
    },
    "qwen3 with experts": {
        ".expert_shared_feed_forward_length": 0,
        ".expert_shared_count": 0,
        ".expert_group_count": 1,
        ".expert_weights_scale": 0.0,
        ".expert_gating_func": 0,
        ".leading_dense_block_count": 0,
        ".swiglu_clamp_exp": [0.0, 0.0],
    },
    "deepseek v3": {".expert_shared_feed_forward_length": 64, ".attention.temperature_scale": 0.0},
    "olmo3, yarn": {".rope.freq_base_swa": 5e5, ".rope.scaling.yarn_ext_factor": 1.0},
    "gemma3": {".final_logit_softcapping": 0.0, ".attention.key_length_swa": 16},
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_neutral_keys_change_nothing(case, tmp_path):
    model_type, fields, keys, tensors = CASES[case]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    file = write_gguf(tmp_path, tmp_path / "a.gguf", keys=keys, tensors=tensors)
    more = write_gguf(tmp_path, tmp_path / "b.gguf", keys=keys | NEUTRAL[case], tensors=tensors)
    assert open_model(more).config() == open_model(file).config()


def test_widths_that_follow_from_others(directory, tmp_path):
    file = write_gguf(directory, tmp_path / "a.gguf")
    without = (".attention.key_length", ".attention.value_length", "tokenizer.ggml.token_type")
    less = write_gguf(directory, tmp_path / "b.gguf", without=without)
    assert open_model(less).config() == open_model(file).config()


def test_linear_factor_without_a_type(directory, tmp_path):
    """Older files have a factor alone, which divides positions."""
    for key in (".rope.scale_linear", ".rope.scaling.factor"):
        file = write_gguf(directory, tmp_path / "model.gguf", keys={key: 4.0})
        rope = open_model(file).config().cache_layers[0].rope
        assert rope.scaling_dict == {"rope_type": "linear", "factor": 4.0}


def test_magnitude_of_long_texts(tmp_path):
    """Files of Phi name the factor that longrope multiplies Q and K with."""
    model_type, fields, keys, tensors = CASES["phi3"]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    keys = keys | {".rope.scaling.attn_factor": 1.25}
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=keys, tensors=tensors)
    assert open_model(file).config().cache_layers[0].rope.scaling_dict["attention_factor"] == 1.25


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({".attention.head_count": "4"}, "llama.attention.head_count must be an integer, got '4'"),
        ({".rope.scaling.type": "ntk"}, "llama.rope.scaling.type 'ntk' is not supported; expected"),
        ({".rope.scaling.type": "yarn"}, "needs llama.rope.scaling.factor"),
        ({".expert_count": 8}, "llama.expert_used_count"),
        ({".logit_scale": 0.5}, r"has the key llama.logit_scale \(0.5\), which is not supported"),
        ({".logit_scale": [1.0, 0.5]}, r"has the key llama.logit_scale \(\[1.0, 0.5\]\), which"),
        ({".attention.head_count": [4, 2]}, "llama.attention.head_count must be the same"),
        ({".attention.sliding_window": 9}, r"has the key llama.attention.sliding_window \(9\)"),
        ({".attention.scale": 0.3}, "has the key llama.attention.scale"),
        ({".rope.freq_base_swa": 3e4}, "has the key llama.rope.freq_base_swa"),
        ({".rope.scaling.attn_factor": 1.5}, "has the key llama.rope.scaling.attn_factor"),
        ({".use_parallel_residual": True}, "has the key llama.use_parallel_residual"),
        ({".expert_shared_count": 2, ".unknown": 0}, "has the key llama.unknown"),
        ({"general.type": "adapter"}, "general.type 'adapter': expected the file of a model"),
        ({".rope.dimension_count": 8}, "llama.rope.dimension_count must be 16"),
        ({".attention.value_length": 8}, "llama.attention.value_length must be 16"),
        ({"split.count": 2}, "split.count: this is one of several files"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; expecte"),
        ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre 'falcon' is not supported; expect"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges has 'ab'; expected two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 values for 300 tok"),
        ({"general.sampling.top_p": 1.5}, "top_p must be from 0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_unsupported_keys_are_named(directory, keys, message, tmp_path):
    file = write_gguf(directory, tmp_path / "model.gguf", keys=keys)
    with pytest.raises(ValueError, match=message) as caught:
        DecoderModel.from_pretrained(file)
    assert str(caught.value).count(str(file)) == 1


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
