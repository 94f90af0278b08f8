# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models that attend to chosen positions, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import (  # noqa: E402
    DecoderModel,
    FinishedEvent,
    ParallelModel,
    SamplingParams,
    config_from_fields,
    generate,
)
from tvm_pagedkv_lm.parallel.parallel import check_stages  # noqa: E402

from ...support.cases.models.family_checks import (  # noqa: E402
    check_another_value_matters,
    check_prompts_that_begin_alike,
)
from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    assert_close,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import all_slow_but  # noqa: E402
from .test_latent_families import EXPERTS, LATENT, YARN  # noqa: E402

# With few heads many positions have a score of exactly 0, of which transformers takes any.
INDEXER = {"index_n_heads": 12, "index_head_dim": 24, "index_topk": 7}
BOTH = LATENT | EXPERTS | INDEXER | {"num_hidden_layers": 3, "mlp_layer_types": None}
ROTATION = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
BLOCKS = {"index_n_heads": 4, "index_head_dim": 24, "index_block_size": 4, "index_topk_blocks": 3}
MINIMAX = BLOCKS | {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rotary_dim": 16,
    "rope_parameters": ROTATION,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "dense_intermediate_size": 80,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "deepseek_v32": BOTH | {"first_k_dense_replace": 1, "rope_parameters": YARN},
    "glm_moe_dsa": BOTH | {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "full"]},
    "minimax_m3_vl_text": MINIMAX,
}
QUICK = ("glm_moe_dsa", "minimax_m3_vl_text")


@pytest.fixture(scope="module", params=all_slow_but(FAMILIES, *QUICK))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


def test_prompts_that_begin_alike(pair):
    check_prompts_that_begin_alike(pair)


def test_drafts_are_chains(pair):
    """A chain is verified in one step; a tree that branches is refused and changes nothing."""
    tokens, drafts, more = random_tokens(2, 13, 5, 3)
    cache = pair.cache()
    cache.add_sequence(0)
    pair.ours.prefill(cache, [0], [tokens])
    with pytest.raises(ValueError, match="token trees branch"):
        pair.ours.logits(cache, [0], [drafts], [[-1, 0, 0, 1, 2]])
    logits = pair.ours.logits(cache, [0], [drafts], [[-1, 0, 1, 2, 3]])[0]
    assert_close(logits, pair.expected([*tokens, *drafts])[13:])
    cache.commit_tree([0], [2])
    text = [*tokens, *drafts[:3], *more]
    assert_close(pair.ours.logits(cache, [0], [more])[0], pair.expected(text)[16:])
    cache.check_integrity()


@pytest.mark.slow
def test_generated_texts_are_those_without_drafts(pair):
    prompts = [[int(x) for x in text] for text in random_tokens(8, 9, 30)]
    params = SamplingParams(max_tokens=40, temperature=0.0)
    texts = []
    for num_drafts in (0, 4):
        events = generate(pair.ours, prompts, params, num_speculative_tokens=num_drafts)
        found = [event for event in events if isinstance(event, FinishedEvent)]
        texts.append([each.tokens for each in sorted(found, key=lambda each: each.prompt)])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("deepseek_v32", {"index_topk": 40}),
        ("glm_moe_dsa", {"index_topk": 40}),
        ("minimax_m3_vl_text", {"index_topk_blocks": 11}),
        ("minimax_m3_vl_text", {"index_block_size": 8}),
        ("minimax_m3_vl_text", {"index_local_blocks": 0}),
        ("minimax_m3_vl_text", {"swiglu_limit": 1.0}),
        ("minimax_m3_vl_text", {"swiglu_alpha": 1.0}),
        ("minimax_m3_vl_text", {"routed_scaling_factor": 1.0}),
        ("minimax_m3_vl_text", {"rope_parameters": ROTATION | {"partial_rotary_factor": 1.0}}),
    ],
    ids=str,
)
def test_the_checkpoints_show_what_is_special(family, other, tmp_path):
    check_another_value_matters(tmp_path, family, FAMILIES[family], other)


@pytest.mark.slow
def test_options(pair):
    """Quantized latent rows, beside index keys that are not; stages."""
    (tokens,) = random_tokens(6, 21)
    expected = pair.expected(tokens)
    model = DecoderModel.from_pretrained(
        pair.folder, "float32", page_size=PAGE_SIZE, kv_dtype="int8"
    )
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    difference = model.logits(cache, [0], [tokens])[0] - expected
    assert 0 < np.median(np.abs(difference)) < 0.1 * expected.std()
    options = {"page_size": PAGE_SIZE, "threads": True, "stages": [0, 2, 3]}
    with ParallelModel.from_pretrained(pair.folder, "float32", **options) as model:
        cache = model.create_cache(1, 64, 64)
        cache.add_sequence(0)
        found = [model.logits(cache, [0], [x])[0] for x in np.split(tokens, [7, 8])]
    assert_close(np.concatenate(found), expected)


@pytest.mark.slow
def test_checkpoints_with_pictures(tmp_path):
    """Published files of MiniMax M3: other names, and fields that older files have."""
    text = Pair(tmp_path, "minimax_m3_vl_text", MINIMAX)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in (*BLOCKS, "layer_types", "mlp_layer_types", "rope_parameters"):
        fields.pop(name)
    fields |= {"rope_theta": 1e4, "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1]}
    fields["sparse_attention_config"] = {
        "use_sparse_attention": True,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 24,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 3,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
        "sparse_attention_freq": [0, 1, 1],
    }
    whole = {"model_type": "minimax_m3_vl", "text_config": fields, "vision_config": {}}
    whole["architectures"] = ["MiniMaxM3SparseForConditionalGeneration"]
    theirs = transformers.AutoConfig.for_model("minimax_m3_vl", text_config=text.theirs.config)
    theirs.vision_config = transformers.AutoConfig.for_model(
        "minimax_m3_vl_vision", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.MiniMaxM3SparseForConditionalGeneration(theirs).float()
    state = text.theirs.model.state_dict()
    model.model.language_model.load_state_dict(state)
    model.lm_head.load_state_dict(text.theirs.lm_head.state_dict())
    model.save_pretrained(tmp_path)  # with the names of the published files
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {
        "language_model.lm_head.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight",
        "language_model.model.layers.1.self_attn.index_q_norm.weight",
    } <= names
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    for ours, expected in zip(found.parameters, text.ours.parameters, strict=True):
        np.testing.assert_array_equal(ours.numpy(), expected.numpy())
    assert found.config.cache_layers == text.ours.config.cache_layers


def test_pages_divide_blocks(tmp_path):
    write_checkpoint(tmp_path, "minimax_m3_vl_text", MINIMAX)
    with pytest.raises(ValueError, match="page_size must divide the blocks of 4 positions .* 16"):
        DecoderModel.from_pretrained(tmp_path, "float32", page_size=16)


def test_what_is_refused(tmp_path):
    write_checkpoint(tmp_path, "minimax_m3_vl_text", MINIMAX)
    with pytest.raises(ValueError, match="num_shards must be 1: workers do not share the heads of"):
        ParallelModel.from_pretrained(tmp_path, num_shards=2)
    with pytest.raises(ValueError, match="lists"):
        DecoderModel.from_pretrained(tmp_path, page_size=PAGE_SIZE, sliding_window=True)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, (0, 1, 4)),
        ({"index_topk_pattern": "FSSFFS"}, (0, 3, 4)),
        ({"indexer_types": ["full", "full", *["shared"] * 4]}, (0, 1)),
    ],
    ids=str,
)
def test_layers_that_choose(pattern, layers):
    shape = {"vocab_size": 9, "num_hidden_layers": 6, "model_type": "glm_moe_dsa"}
    config = config_from_fields(FAMILIES["glm_moe_dsa"] | {"indexer_types": None} | shape | pattern)
    chooses = [layer.attention.index.chooses for layer in config.layers]
    assert [i for i, each in enumerate(chooses) if each] == [*layers]
    kinds = [["mla", "index" if index in layers else "linear"] for index in range(6)]
    assert [layer.kind for layer in config.cache_layers] == sum(kinds, [])
    theirs = transformers.GlmMoeDsaConfig(**shape | pattern)
    assert [kind == "full" for kind in theirs.indexer_types] == [i in layers for i in range(6)]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is required"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim .4. must be at least qk_rope"),
        ("glm_moe_dsa", {"indexer_types": ["full", "none", "full"]}, "must say full or shared for"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types must say full or shared for 3"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, "the first layer must be full"),
        ("minimax_m3_vl_text", {"index_n_heads": 3}, "index_n_heads .3. must divide num_key_value"),
        ("minimax_m3_vl_text", {"index_head_dim": 8}, "must be at least the rotated part of a hea"),
        ("minimax_m3_vl_text", {"index_local_blocks": -1}, "must be an integer from 0 on, got -1"),
        ("minimax_m3_vl_text", {"mlp_layer_types": ["dense"]}, "must say dense or sparse for 3"),
        ("minimax_m3_vl_text", {"qk_norm_type": "layer"}, "qk_norm_type must be 'per_head' in Min"),
    ],
)
def test_fields_are_checked(family, changes, message):
    fields = FAMILIES[family] | {"vocab_size": 9, "model_type": family}
    with pytest.raises(ValueError, match=message):
        config_from_fields(fields | changes)


def test_stages_begin_with_a_layer_that_chooses():
    fields = FAMILIES["glm_moe_dsa"] | {"vocab_size": 9, "model_type": "glm_moe_dsa"}
    config = config_from_fields(fields)
    check_stages(config, (0, 2, 3))
    with pytest.raises(ValueError, match="may not begin with layer 1, which attends to the posi"):
        check_stages(config, (0, 1, 3))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
