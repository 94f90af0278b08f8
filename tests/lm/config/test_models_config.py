# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of every family, in old and new spellings, and what is wrong with others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

from tvm_pagedkv import LayerSpec, RopeConfig  # noqa: E402
from tvm_pagedkv_lm import DecoderConfig, DecoderModel, config_from_directory, config_from_fields  # noqa: E402
from tvm_pagedkv_lm.config.query_scale import QueryScale  # noqa: E402
from tvm_pagedkv_lm.families.registry import FAMILIES  # noqa: E402
from tvm_pagedkv_lm.model.source import TINY  # noqa: E402

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
# What families need to be read with `SHAPE`.
OWN_FIELDS = {
    "LlamaForCausalLM": {},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16},
    "FalconH1ForCausalLM": {"mamba_n_heads": 8},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "num_local_experts": 0},
    **dict.fromkeys(
        (
            "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
            "Mistral3ForConditionalGeneration", "Llama4ForConditionalGeneration",
        ),
        {"text_config": SHAPE},
    ),
    "Gemma3ForConditionalGeneration": {"text_config": SHAPE | {"sliding_window": 32}},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma3nForConditionalGeneration": {"text_config": SHAPE | {"num_kv_shared_layers": 0}},
    "Gemma4ForConditionalGeneration": {"text_config": SHAPE},
    "MiniMaxM3VLForCausalLM": {"index_n_heads": 2},
    "MiniMaxM3SparseForConditionalGeneration": {"text_config": SHAPE | {"index_n_heads": 2}},
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
            "Mistral4ForCausalLM",
        ),
        {"moe_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    **dict.fromkeys(
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "q_lora_rank": 32},
    ),
}  # fmt: skip
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def config_of(architecture: str, **fields) -> DecoderConfig:
    return config_from_fields({"architectures": [architecture], **SHAPE, **fields})


# --- old and new spellings -----------------------------------------------------------------------


def test_gemma3_of_older_files():
    old = config_of(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    new = config_of(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=512,
        layer_types=kinds,
        rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}},
    )
    assert old == new
    local = LayerSpec("mha_sliding", 512, rope=RopeConfig(theta=1e4, rotary_dim=16))
    scaling = {"rope_type": "linear", "factor": 8.0}
    last = LayerSpec(rope=RopeConfig(theta=1e6, rotary_dim=16, scaling=scaling))
    assert old.cache_layers == (*[local] * 5, last)
    assert old.layers[0].attention.sm_scale == 256**-0.5 and old.head_dim == 16


def test_gemma2_alternates_and_has_soft_caps_unless_null():
    config = config_of("Gemma2ForCausalLM", sliding_window=32)
    assert [layer.window for layer in config.cache_layers] == [32, None] * 3
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.tied_embeddings and config.embedding_scale == 8.0 and config.head_dim == 256
    without = config_of("Gemma2ForCausalLM", sliding_window=32, attn_logit_softcapping=None)
    assert (without.attention_softcap, without.logit_softcap) == (None, 30.0)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_of_older_files(name):
    """Phi-4-mini rotates a part of a head; the first files say "yarn" or "su"."""
    fields = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 1024}
    old = config_of("Phi3ForCausalLM", **fields, rope_scaling={"type": name, **FACTORS})
    assert old.short_text == 1024
    rope = old.cache_layers[0].rope
    assert rope.rotary_dim == 8 and rope.scaling_dict["factor"] == 4.0
    if name == "longrope":
        new = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
        assert config_of("Phi3ForCausalLM", **fields, rope_parameters=new) == old


def test_qwen_has_windows_only_where_they_are_on():
    fields = {"sliding_window": 32, "max_window_layers": 4}
    plain = config_of("Qwen2ForCausalLM", **fields, use_sliding_window=False)
    assert [layer.window for layer in plain.cache_layers] == [None] * 6
    config = config_of("Qwen2ForCausalLM", **fields, use_sliding_window=True)
    assert [layer.window for layer in config.cache_layers] == [None] * 4 + [32] * 2
    assert config_of("Qwen3ForCausalLM").head_dim == 128


NONE = RopeConfig(mode="none")
WINDOW = LayerSpec("mha_sliding", 512, rope=RopeConfig(theta=5e4, rotary_dim=16))


def test_olmo3_scales_the_rotation_of_layers_without_a_window():
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    old = config_of("Olmo3ForCausalLM", sliding_window=512, rope_theta=5e4, rope_scaling=scaling)
    full = LayerSpec(rope=RopeConfig(theta=5e4, rotary_dim=16, scaling=scaling))
    assert old.cache_layers == (*[WINDOW] * 3, full, *[WINDOW] * 2)
    assert config_of("Olmo3ForCausalLM").cache_layers[3].rope.theta == 5e5


def test_cohere2_of_older_files():
    old = config_of(
        "Cohere2ForCausalLM", sliding_window=512, sliding_window_pattern=3, rope_theta=5e4
    )
    full = LayerSpec(rope=NONE)
    assert old.cache_layers == (WINDOW, WINDOW, full) * 2
    assert old.tied_embeddings and old.logit_scale == 0.0625 and old.norm_eps == 1e-5


@pytest.mark.parametrize("pattern", ["LLG", 3])
def test_exaone4_by_its_pattern(pattern):
    fields = {"sliding_window_pattern": pattern, "rope_theta": 5e4}
    config = config_of("Exaone4ForCausalLM", sliding_window=512, **fields)
    assert config.cache_layers == (WINDOW, WINDOW, LayerSpec(rope=NONE)) * 2
    plain = config_of("Exaone4ForCausalLM", sliding_window=None, rope_theta=5e4)
    assert plain.cache_layers == (LayerSpec(rope=WINDOW.rope),) * 6
    with pytest.raises(ValueError, match="sliding_window_pattern must be a positive integer"):
        config_of("Exaone4ForCausalLM", sliding_window=512, sliding_window_pattern="LXG")


def test_ministral3_alone_and_with_pictures():
    alone = config_of("Ministral3ForCausalLM")
    assert {layer.attention.query_scale for layer in alone.layers} == {QueryScale(16384, 0.1)}
    assert alone.cache_layers[0].rope.scaling_dict["factor"] == 16.0 and alone.head_dim == 128
    text = SHAPE | {"model_type": "ministral3"}
    whole = config_of("Mistral3ForConditionalGeneration", text_config=text)
    assert replace(whole, names=alone.names) == alone


def test_smollm3_says_which_layers_rotate():
    rotated, plain = LayerSpec(rope=RopeConfig(theta=2e6, rotary_dim=16)), LayerSpec(rope=NONE)
    assert config_of("SmolLM3ForCausalLM").cache_layers == (*[rotated] * 3, plain, *[rotated] * 2)
    listed = config_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 0, 0, 1])
    assert listed.cache_layers == (plain, *[rotated] * 4, plain)
    windows = {"use_sliding_window": True, "sliding_window": 512, "no_rope_layer_interval": 3}
    config = config_of("SmolLM3ForCausalLM", **windows)
    assert [layer.window for layer in config.cache_layers] == [None, None, 512] * 2
    for wrong in ([1, 1], [2] * 6, "110110"):
        with pytest.raises(ValueError, match="no_rope_layers must list 0 or 1 for 6 layers"):
            config_of("SmolLM3ForCausalLM", no_rope_layers=wrong)


def test_proportional_rotation_is_of_the_whole_head():
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    (layer, *_) = config_of("LlamaForCausalLM", rope_parameters=rope).cache_layers
    assert layer.rope.rotary_dim == 16
    assert layer.rope.scaling_dict["partial_rotary_factor"] == 0.25
    with pytest.raises(ValueError, match="must be a number from 0 to 1, got 1.5"):
        config_of("LlamaForCausalLM", rope_parameters=rope | {"partial_rotary_factor": 1.5})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_type_will_do(name):
    model_type = FAMILIES[name].model_type
    fields = SHAPE | OWN_FIELDS.get(name, {"sliding_window": 32})
    assert config_from_fields(fields | {"model_type": model_type}) == config_of(name, **fields)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"dtype": "float64"}, "float32"),
    ],
)
def test_type_of_the_checkpoint(fields, dtype):
    assert config_of("LlamaForCausalLM", **fields).dtype == dtype


@pytest.mark.parametrize(
    ("own", "of_generation", "ids"),
    [(2, None, (2,)), (None, [7, 8], (7, 8)), ([2, 3], [3, 9], (2, 3, 9)), (5, "no file", (5,))],
)
def test_ends_of_a_text(own, of_generation, ids, tmp_path):
    fields = {"architectures": ["LlamaForCausalLM"], **SHAPE, "eos_token_id": own}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if of_generation != "no file":
        text = json.dumps({"eos_token_id": of_generation})
        (tmp_path / "generation_config.json").write_text(text)
    assert config_from_directory(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "x"}'])
def test_errors_name_the_file_once(text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    file = tmp_path / "generation_config.json"
    for each in (file, tmp_path / "config.json"):
        each.write_text(text)
        with pytest.raises(ValueError) as caught:
            config_from_directory(tmp_path)
        assert str(caught.value).count(str(each)) == 1


# --- what is not supported -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen2ForCausal"]}, r"unknown architecture Qwen2ForCausal \(the nea"
         r"rest is Qwen2ForCausalLM\); supported: LlamaForCausalLM, .*Olmo2ForCausalLM"),
        ({"architectures": ["T5Model"]}, "unknown architecture T5Model; supported: Llama"),
        ({"architectures": [], "model_type": "gemma_2"}, r"gemma_2 \(the nearest is gemma2\)"),
        ({}, r"unknown architecture \(none given\); supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, got 'Ll"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60},
         "Qwen2MoeForCausalLM is not supported: other mixture-of-experts models are not"),
        ({"architectures": ["JetMoeForCausalLM"]}, "mixture-of-experts models are not there yet"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"a": 1}},
         "models with encoders of pictures or sound are not there yet"),
        ({"architectures": ["LongcatFlashForCausalLM"], "n_routed_experts": 8, "kv_lora_rank": 4},
         r"mixture-of-experts models and other models with multi-head latent attention \(MLA\) a"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}},
         r"quantized weights \(awq\) are not supported"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {
            "quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8},
            "config_groups": {"group_0": {}}}},
         r"quantized weights \(compressed-tensors\) are not supported"),
    ],
)  # fmt: skip
def test_architectures(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_fields(SHAPE | fields)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window must be true or fal"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 4,
                              "max_window_layers": "6"}, "max_window_layers must be an integer"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window must be a positive int"),
        ("Gemma2ForCausalLM", {"sliding_window": 4, "layer_types": ["full_attention"]},
         r"layer_types must list 6 layers, got \['full_attention'\]"),
        ("Gemma2ForCausalLM", {"sliding_window": 4, "layer_types": ["chunked"] * 6},
         "layer_types must be of 'full_attention' and 'sliding_attention', got 'chunked'"),
        ("Gemma2ForCausalLM", {"sliding_window": 4, "attn_logit_softcapping": -1},
         "attn_logit_softcapping must be a positive number, got -1"),
        ("Gemma2ForCausalLM", {"sliding_window": 4, "hidden_activation": "relu"},
         "hidden_activation 'relu' is not supported; expected 'gelu_pytorch_tanh'"),
        ("Gemma3ForCausalLM", {"sliding_window": 4, "use_bidirectional_attention": True},
         "use_bidirectional_attention"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "needs short_factor, long"),
        ("LlamaForCausalLM", {"eos_token_id": "x"}, "eos_token_id must be a token id or a list"),
        ("LlamaForCausalLM", {"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ("LlamaForCausalLM", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
    ],
)  # fmt: skip
def test_fields(architecture, fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(architecture, **fields)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, True, 10**400])
def test_numbers_that_json_files_may_have(value):
    with pytest.raises(ValueError, match="rms_norm_eps must be a positive number"):
        config_of("LlamaForCausalLM", **SHAPE | {"rms_norm_eps": value})


# --- files that do not fit -----------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


def _edit(file, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _message(directory, error=ValueError) -> str:
    with pytest.raises(error) as caught:
        DecoderModel.from_pretrained(directory)
    return str(caught.value)


def test_all_missing_shards_are_named(directory):
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (directory / "model.safetensors").rename(directory / shards[1])
    index = {"weight_map": {f"tensor {i}": shard for i, shard in enumerate(shards)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    message = _message(directory, FileNotFoundError)
    assert f"lacks 2 of the 3 files that have its weights: {shards[0]}, {shards[2]}" in message


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_shards_lie_in_the_folder(directory, file):
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": file}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"tensor model.norm.weight is in {file!r}" in _message(directory)


def test_tensors_that_the_model_has_no_use_for(directory):
    """A bias that config.json does not name is refused; stored rotation tables are ignored."""
    tensors = load_file(directory / "model.safetensors")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(16, "float32"),
        "model.layers.2.self_attn.q_proj.bias": np.zeros(192, "float32"),
    }
    save_file(tensors | extra, directory / "model.safetensors")
    assert "has tensor model.layers.2.self_attn.q_proj.bias, which the model" in _message(directory)
    _edit(directory / "config.json", num_hidden_layers=2)
    assert "has tensor model.layers.2." in _message(directory)
    assert "the model has only 2 layers" in _message(directory)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("Qwen2ForCausalLM", "lacks tensor model.layers.0.self_attn.q_proj.bias; expected shape"),
        ("Phi3ForCausalLM", "has tensor model.layers.0.mlp.gate_proj.weight, which the model"),
        ("Qwen3ForCausalLM", "lacks tensor model.layers.0.self_attn.q_norm.weight; expected sh"),
    ],
)
def test_tensors_of_another_family(directory, architecture, message):
    _edit(directory / "config.json", architectures=[architecture])
    assert message in _message(directory)


def test_tokenizer_of_another_model(directory):
    tensors = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name][:200]}, directory / "model.safetensors")
    _edit(directory / "config.json", vocab_size=200)
    message = _message(directory)
    assert "the tokenizer has 256 tokens, and the model's embeddings have 200 rows" in message


def test_a_layer_of_each_kind_has_its_own_cache_rows():
    """Windows keep few pages; what else decides the kernels is the same."""
    from tvm_pagedkv.compiler.build import resolve_target
    from tvm_pagedkv_lm.config.options import BuildOptions
    from tvm_pagedkv_lm.model.caches import cache_config

    config = config_of("Gemma2ForCausalLM", head_dim=16, sliding_window=32)
    options = BuildOptions("float32", 16, resolve_target())
    cache = cache_config(config, options, (2, 4096, 64))
    sizes = [cache.resolved().num_pages_of(layer) for layer in cache.resolved().layers]
    assert sizes[1::2] == [256] * 3 and max(sizes[::2]) < 20
    assert cache.logit_softcap == 50.0 and cache.sliding_window is False
    inline = cache_config(config, replace(options, sliding_window=True))
    assert {layer.rope.mode for layer in inline.layers} == {"inline"}
    some = cache_config(config_of("SmolLM3ForCausalLM"), replace(options, sliding_window=True))
    assert [layer.rope.mode for layer in some.layers[2:4]] == ["inline", "none"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
