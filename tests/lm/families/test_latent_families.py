# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models with latent attention, step by step, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel, ParallelModel, config_from_fields  # noqa: E402
from tvm_pagedkv_lm.formats.weight_formats import GROUP, INT8, quantize  # noqa: E402

from ...support.cases.models.family_checks import (  # noqa: E402
    check_another_value_matters,
    check_prompts_that_begin_alike,
    check_token_trees,
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

# The text model of Mistral 4 is not among those that this class finds by itself.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)
LATENT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
}
EXPERTS = {
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
BOTH = LATENT | EXPERTS | {"first_k_dense_replace": 1}
FAMILIES = {
    "deepseek_v3": BOTH | {"rope_parameters": YARN},
    "deepseek_v2": BOTH | {"topk_method": "group_limited_greedy", "q_lora_rank": None},
    "glm4_moe_lite": LATENT | EXPERTS,
    "mistral4": BOTH
    | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}, "n_group": 1, "topk_group": 1},
}
# What makes a family what it is: with another value the logits must be others, or the tests of
# the family would not notice it.
OTHER_VALUES = [
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.5}}),
    ("deepseek_v3", {"topk_group": 4}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 2}),
    ("mistral4", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    ("mistral4", {"norm_topk_prob": False}),
]
# Checkpoints of a family that the cases above do not have.
VARIANTS = {
    "deepseek_v2, V2-Lite": ("deepseek_v2", {"topk_method": "greedy", "rope_parameters": YARN}),
    "deepseek_v2, biases": ("deepseek_v2", {"q_lora_rank": 16, "attention_bias": True}),
    "deepseek_v3, Kimi K2": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "deepseek_v3, halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
}
QUICK = ("deepseek_v3",)


@pytest.fixture(scope="module", params=all_slow_but(FAMILIES, *QUICK))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


def test_token_trees(pair):
    check_token_trees(pair)


@pytest.mark.slow
def test_prompts_that_begin_alike(pair):
    check_prompts_that_begin_alike(pair)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants(family, changes, tmp_path):
    CHECKS["chunks"](Pair(tmp_path, family, FAMILIES[family] | changes), 0)


@pytest.mark.parametrize(("family", "other"), OTHER_VALUES, ids=str)
def test_the_checkpoints_show_what_is_special(family, other, tmp_path):
    check_another_value_matters(tmp_path, family, FAMILIES[family], other)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", FAMILIES["deepseek_v3"])


def _found(folder, tokens, **options) -> np.ndarray:
    """Logits of a model that is loaded with options."""
    dtype = options.pop("dtype", "float32")
    model = DecoderModel.from_pretrained(folder, dtype, page_size=PAGE_SIZE, **options)
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    return np.concatenate([model.logits(cache, [0], [x])[0] for x in np.split(tokens, [7, 8])])


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_quantized_latent_rows(deepseek, kv_dtype):
    (tokens,) = random_tokens(6, 21)
    expected = deepseek.expected(tokens)
    difference = _found(deepseek.folder, tokens, kv_dtype=kv_dtype) - expected
    # Where two experts are nearly as good, a token may take the other one.
    assert 0 < np.median(np.abs(difference)) < 0.1 * expected.std()


@pytest.mark.slow
def test_weights_in_8_bits(deepseek):
    """Logits are those of transformers with the weights that the codes stand for."""
    (tokens,) = random_tokens(4, 20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(deepseek.folder, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        is_matrix = parameter.ndim > 1 and parameter.shape[-1] % GROUP == 0
        if is_matrix and not name.endswith(("mlp.gate.weight", "kv_b_proj.weight")):
            rows = parameter.detach().numpy().reshape(-1, parameter.shape[-1])
            parameter.data = torch.tensor(quantize(rows, INT8).values()).reshape(parameter.shape)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    found = _found(deepseek.folder, tokens, weights="int8")
    # The projection of K is rounded along its rows, and for Q along its columns.
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_bfloat16_is_close(tmp_path):
    fields = FAMILIES["deepseek_v3"] | {"initializer_range": 0.1, "num_experts_per_tok": 6}
    theirs = write_checkpoint(tmp_path, "deepseek_v3", fields)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tokens,) = random_tokens(4, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    difference = _found(tmp_path, tokens, dtype=None) - expected
    assert np.median(np.abs(difference)) < 0.02 * expected.std()


@pytest.mark.slow
def test_stages(deepseek):
    (tokens,) = random_tokens(5, 20)
    options = {"page_size": PAGE_SIZE, "threads": True, "stages": 2}
    with ParallelModel.from_pretrained(deepseek.folder, "float32", **options) as model:
        cache = model.create_cache(1, 64, 64)
        cache.add_sequence(0)
        chunks = np.split(tokens, [7, 8])
        found = np.concatenate([model.logits(cache, [0], [x])[0] for x in chunks])
    assert_close(found, deepseek.expected(tokens))


def test_what_is_refused(deepseek, tmp_path):
    with pytest.raises(ValueError, match="num_shards must be 1: workers do not share latent"):
        ParallelModel.from_pretrained(deepseek.folder, num_shards=2)
    with pytest.raises(ValueError, match="sliding_window is not possible with MLA layers"):
        DecoderModel.from_pretrained(deepseek.folder, sliding_window=True)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is not supported in DeepSeek V2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "must be dense, then sparse"),
        ("mistral4", {"n_group": 2}, "n_group must be 1 in Mistral 4, got 2"),
    ],
)
def test_fields_are_checked(family, changes, message):
    fields = FAMILIES[family] | {"vocab_size": 9, "num_hidden_layers": 2, "model_type": family}
    with pytest.raises(ValueError, match=message):
        config_from_fields(fields | changes)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
