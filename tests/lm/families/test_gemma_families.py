# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models of Gemma 3n and Gemma 4, step by step, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv import LayerSpec  # noqa: E402
from tvm_pagedkv_lm import (  # noqa: E402
    DecoderModel,  # noqa: E402
    FinishedEvent,
    SamplingParams,
    generate,
)
from tvm_pagedkv_lm.blocks.decoder import row_width, stream_width  # noqa: E402
from tvm_pagedkv_lm.config.layer import Layer  # noqa: E402
from tvm_pagedkv_lm.families.gemma3n import gemma3n  # noqa: E402
from tvm_pagedkv_lm.families.gemma4 import gemma4  # noqa: E402
from tvm_pagedkv_lm.model.work import Work  # noqa: E402
from tvm_pagedkv_lm.parallel.parallel import check_shards, check_stages  # noqa: E402

from ...support.cases.models.family_checks import (  # noqa: E402
    check_another_value_matters,
    check_prompts_that_begin_alike,
    check_token_trees,
)
from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    VOCAB_SIZE,
    Pair,
    assert_close,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import all_slow_but  # noqa: E402

SLIDING, FULL = "sliding_attention", "full_attention"
# Two layers with K and V, a window in one of them; then one that reads theirs.
SHAPE = {
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "sliding_window": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 48,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 4.0,
}
ROTATIONS = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
GEMMA3N = SHAPE | {
    "layer_types": [SLIDING, FULL, SLIDING],
    "intermediate_size": [80, 96, 80],
    "activation_sparsity_pattern": [0.9, 0.0, 0.6],
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "vocab_size_per_layer_input": 150,  # tokens beyond it get its first row
}
GEMMA4 = SHAPE | {
    "layer_types": [SLIDING, FULL, FULL],
    "intermediate_size": 80,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
    "rope_parameters": ROTATIONS,
}
# As the models without per-layer embeddings, and with experts, which share no K and V.
WITH_EXPERTS = GEMMA4 | {
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
CASES = {
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4, experts": ("gemma4_text", WITH_EXPERTS),
}
# What makes a family what it is: with another value the logits must be others, or the tests of
# the family would not notice it.
OTHER_VALUES = [
    ("gemma3n", {"sliding_window": 256}),
    ("gemma3n", {"num_kv_shared_layers": 0}),
    ("gemma3n", {"activation_sparsity_pattern": [0.0] * 3}),
    ("gemma3n", {"altup_correct_scale": False}),
    ("gemma3n", {"final_logit_softcapping": 30.0}),
    ("gemma4", {"sliding_window": 256}),
    ("gemma4", {"rope_parameters": ROTATIONS | {FULL: ROTATIONS[SLIDING]}}),
    ("gemma4", {"rope_parameters": {
        **ROTATIONS, FULL: ROTATIONS[FULL] | {"partial_rotary_factor": 1.0},
    }}),
    ("gemma4", {"final_logit_softcapping": 30.0}),
]  # fmt: skip


@pytest.fixture(scope="module", params=all_slow_but(CASES, "gemma3n"))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), *CASES[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


@pytest.mark.slow
def test_token_trees(pair):
    check_token_trees(pair)


@pytest.mark.slow
def test_prompts_that_begin_alike(pair):
    check_prompts_that_begin_alike(pair)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), OTHER_VALUES, ids=str)
def test_the_checkpoints_show_what_is_special(name, other, tmp_path):
    check_another_value_matters(tmp_path, *CASES[name], other)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"sliding_window": True}], ids=str)
def test_other_caches(name, options, tmp_path):
    """Quantized pages; and K that is rotated when it is read, as where sequences have windows."""
    theirs = write_checkpoint(tmp_path, *CASES[name])
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE, **options)
    (tokens,) = random_tokens(0, 41)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    chunks = np.split(tokens, [5, 18, 40])
    found = np.concatenate([model.logits(cache, [0], [chunk])[0] for chunk in chunks])
    if "kv_dtype" not in options:
        assert_close(found, expected)
    elif name != "gemma4, experts":  # where routers may choose other experts
        assert 0 < (found - expected).std() < 0.05 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_files_with_pictures(name, tmp_path):
    """Published files have encoders besides, and K and V of layers that read those of others."""
    from safetensors.torch import load_file, save_file

    model_type, fields = CASES[name]
    theirs = write_checkpoint(tmp_path, model_type, fields)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": [config["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
        "text_config": config,
        "vision_config": {"hidden_size": 8},
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    unused = "model.language_model.layers.2.self_attn."
    tensors |= {f"{unused}k_proj.weight": torch.ones(2, 2), f"{unused}v_proj.weight": torch.ones(2)}
    tensors["model.vision_tower.patch.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = DecoderModel.from_pretrained(tmp_path, page_size=PAGE_SIZE)
    (tokens,) = random_tokens(0, 30)
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    assert_close(model.logits(cache, [0], [tokens])[0], expected)


@pytest.mark.slow
def test_drafts_change_no_text(tmp_path):
    write_checkpoint(tmp_path, *CASES["gemma3n"])
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for num_drafts in (0, 4):
        events = generate(model, [[5, 6, 7, 8] * 6], params, num_speculative_tokens=num_drafts)
        texts += [event.tokens for event in events if isinstance(event, FinishedEvent)]
    assert texts[0] == texts[1] and len(texts[0]) == 24


# --- without a model ------------------------------------------------------------------------------

# The text model of Gemma 3n E2B as it is published.
E2B = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "intermediate_size": [8192] * 30,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 6,
    "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}


def source_of(config, index: int) -> int | None:
    """The layer whose K and V a layer attends to, if it has none itself."""
    return getattr(config.layers[index].attention, "source", None)


def test_layers_of_gemma3n():
    config = gemma3n(E2B)
    kinds = [layer.kind for layer in config.cache_layers]
    assert kinds == (["mha_sliding"] * 4 + ["mha"]) * 4 + ["linear"] * 10
    assert [source_of(config, i) for i in (19, 20, 23, 24, 29)] == [None, 18, 18, 19, 19]
    assert [config.cache_layers[i].rope.theta for i in (3, 4)] == [1e4, 1e6]
    assert config.layers[9].mlp.deviations == pytest.approx(1.6448536)
    assert config.layers[10].mlp.deviations is None
    assert row_width(config) == 2048 + 30 * 256 and stream_width(config) == 4 * 2048
    assert config.logit_softcap == 30.0 and config.layers[0].attention.scale == 1.0
    # What layers read of the K and V of others counts as theirs.
    position = 2 * 2 * 256 * 2
    work = Work(config, 2)
    assert work.num_bytes(1000, [1000]) - work.weight_bytes == position * (24 * 512 + 6 * 1000)


def test_layers_of_gemma4():
    fields = E2B | {
        "num_hidden_layers": 35,
        "layer_types": None,
        "intermediate_size": 6144,
        "num_kv_shared_layers": 20,
        "rope_parameters": None,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
    }
    config = gemma4(fields)
    own = [layer.attention for layer in config.layers[:15]]
    assert {each.num_kv_heads for each in own} == {2}
    assert [i for i, each in enumerate(own) if each.head_dim == 512] == [5, 11]
    assert config.layers[14].mlp.width == 6144 and config.layers[15].mlp.width == 12288
    assert source_of(config, 34) == 11  # without a window, as the last layer
    assert source_of(config, 33) == 14
    assert config.cache_layers[5].rope.scaling_dict["rope_type"] == "proportional"
    assert not any(each.v_is_k for each in own) and config.layers[0].has_scale
    own = {5: {"head_dim": 128, "num_key_value_heads": 1}}
    config = gemma4(fields | {"per_layer_config": own, "attention_k_eq_v": True})
    own = [layer.attention for layer in config.layers[:15]]
    assert (own[5].num_kv_heads, own[5].head_dim, own[11].head_dim) == (1, 128, 256)
    assert config.cache_layers[5].v_head_dim == 128
    assert [i for i, each in enumerate(own) if each.v_is_k] == [5, 11]


@pytest.mark.parametrize(
    ("reader", "fields", "reason"),
    [
        ("gemma3n", {"intermediate_size": [8192] * 29}, "intermediate_size must be a number or 30"),
        ("gemma3n", {"intermediate_size": 0.5}, "intermediate_size must be positive"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 30}, r"must be of \[0, 1\)"),
        ("gemma3n", {"num_kv_shared_layers": 27}, "leaves no layer of kind full_attention"),
        ("gemma3n", {"num_kv_shared_layers": 31}, "integer from 0 to 30, got 31"),
        ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx must be an integer from 0 to 3"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "'all' is unsupported"),
        (
            "gemma4",
            {"per_layer_config": {"0": {"sliding_window": 3}}},
            "layer 0 has sliding_window",
        ),
        ("gemma4", {"per_layer_config": 3}, "per_layer_config must be an object"),
    ],
    ids=str,
)
def test_fields_that_are_refused(reader, fields, reason):
    read, own = {"gemma3n": (gemma3n, {}), "gemma4": (gemma4, {"intermediate_size": 6144})}[reader]
    with pytest.raises(ValueError, match=reason):
        read(E2B | own | fields)


def test_workers_do_not_share_them():
    config = gemma3n(E2B)
    with pytest.raises(ValueError, match="stages must be 1: the model has layers that attend to"):
        check_stages(config, (0, 1, 30))
    with pytest.raises(ValueError, match="num_shards must be 1: workers do not share layers that"):
        check_shards(config, 2)
    attention = replace(config.layers[0].attention, spec=LayerSpec(qk_head_dim=32))
    own_heads = replace(config, layers=(Layer(attention),) * 30)
    check_stages(own_heads, (0, 1, 30))
    with pytest.raises(ValueError, match="have heads of their own"):
        check_shards(own_heads, 2)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
