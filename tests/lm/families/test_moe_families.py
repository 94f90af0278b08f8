# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models with experts, step by step, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from tvm_pagedkv_lm import DecoderModel, ParallelModel  # noqa: E402
from tvm_pagedkv_lm.formats.weight_formats import GROUP, INT4_MINIMA, INT8, quantize  # noqa: E402

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

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WIDE = HEADS | {"hidden_size": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen3_moe": WIDE
    | {
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "glm4_moe": WIDE
    | {
        "intermediate_size": 80,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": WIDE
    | {
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "rope_parameters": YARN,
    },
    "llama4_text": WIDE
    | {
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 9,
        "intermediate_size": 32,
        "intermediate_size_mlp": 80,
        "moe_layers": [0, 2, 3],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "floor_scale": 5,
        "attn_scale": 0.5,
    },
    "minimax_m2": WIDE
    | {
        "intermediate_size": 32,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
    },
    "mixtral": WIDE
    | {
        "intermediate_size": 80,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
}
# What makes a family what it is: with another value the logits must be others, or the tests of
# the family would not notice it.
OTHER_VALUES = [
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts_per_tok": 3}),
    ("qwen3_moe", {"mlp_only_layers": []}),
    ("glm4_moe", {"topk_group": 4}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"routed_scaling_factor": 1.0}),
    ("glm4_moe", {"use_qk_norm": False}),
    ("glm4_moe", {"first_k_dense_replace": 0}),
    ("gpt_oss", {"sliding_window": 256}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", {"swiglu_limit": 3.0}),
    ("gpt_oss", {"num_experts_per_tok": 2}),
    ("gpt_oss", {"rope_parameters": YARN | {"truncate": True}}),
    ("llama4_text", {"attention_chunk_size": 256}),
    ("llama4_text", {"no_rope_layers": [1, 1, 1, 0]}),
    ("llama4_text", {"use_qk_norm": False}),
    ("llama4_text", {"attn_temperature_tuning": False}),
    ("llama4_text", {"floor_scale": 8}),
    ("llama4_text", {"num_experts_per_tok": 1}),
    ("minimax_m2", {"rotary_dim": 16}),
    ("minimax_m2", {"num_experts_per_tok": 4}),
    ("mixtral", {"sliding_window": 256}),
    ("mixtral", {"num_experts_per_tok": 3}),
]
# Checkpoints of a family that the cases above do not have.
VARIANTS = {
    "qwen3_moe, probabilities": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, every second layer": (
        "qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}
    ),
    "glm4_moe, one group": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "norm_topk_prob": False},
    ),
    "mixtral, no window": ("mixtral", {"sliding_window": None}),
    "llama4, dense": (
        "llama4_text",
        {"moe_layers": [], "num_local_experts": 0, "num_experts_per_tok": 0, "no_rope_layers": []},
    ),
}  # fmt: skip
QUICK = ("qwen3_moe", "gpt_oss", "llama4_text")


def _marked(families):
    """The families; those that add nothing to the code of others are slow."""
    return [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in families
    ]


@pytest.fixture(scope="module", params=_marked(FAMILIES))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    check(pair, seed)


def test_pops(pair):
    tokens, other = random_tokens(1, 30, 9)
    cache = pair.cache()
    cache.add_sequence(0)
    pair.ours.prefill(cache, [0], [tokens])
    cache.pop_n(0, 5)
    logits = pair.ours.logits(cache, [0], [other])[0]
    assert_close(logits, pair.expected([*tokens[:25], *other])[25:])


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
def qwen(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("qwen"), "qwen3_moe", FAMILIES["qwen3_moe"])


def _found(pair: Pair, tokens, **options) -> np.ndarray:
    """Logits of a model that is loaded with options."""
    dtype = options.pop("dtype", "float32")
    model = DecoderModel.from_pretrained(pair.folder, dtype, page_size=PAGE_SIZE, **options)
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    return np.concatenate([model.logits(cache, [0], [x])[0] for x in np.split(tokens, [7, 8])])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_experts_in_8_or_4_bits(qwen, weights):
    """Logits are those of transformers with the weights that the codes stand for."""
    (tokens,) = random_tokens(4, 20)
    options = {"page_size": PAGE_SIZE, "weights": weights}
    model = DecoderModel.from_pretrained(qwen.folder, "float32", **options)
    formats = dict(model.options.formats)
    assert "layers.0.mlp.down.weight" in formats and "layers.0.mlp.router.weight" not in formats
    theirs = transformers.AutoModelForCausalLM.from_pretrained(qwen.folder, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        is_matrix = parameter.ndim > 1 and parameter.shape[-1] % GROUP == 0
        if is_matrix and not name.endswith("mlp.gate.weight"):
            has_8_bits = weights == "int8" or "embed_tokens" in name or "lm_head" in name
            rows = parameter.detach().numpy().reshape(-1, parameter.shape[-1])
            rounded = quantize(rows, INT8 if has_8_bits else INT4_MINIMA).values()
            parameter.data = torch.tensor(rounded).reshape(parameter.shape)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    found = _found(qwen, tokens, weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-2)  # activations of 16 bits


@pytest.mark.slow
def test_quantized_attention_beside_experts(qwen):
    (tokens,) = random_tokens(6, 21)
    found, expected = _found(qwen, tokens, kv_dtype="int8"), qwen.expected(tokens)
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_bfloat16_is_close(tmp_path):
    fields = FAMILIES["mixtral"] | {"initializer_range": 0.1, "num_experts_per_tok": 5}
    pair = Pair(tmp_path, "mixtral", fields)
    pair.theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    pair.theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tokens,) = random_tokens(4, 20)
    found, expected = _found(pair, tokens, dtype=None), pair.expected(tokens)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_a_checkpoint_in_shards(qwen, tmp_path):
    """Tensors of several files, of which an index tells the file of each."""
    theirs = write_checkpoint(tmp_path, "qwen3_moe", FAMILIES["qwen3_moe"], max_shard_size="200KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    assert len([*theirs.parameters()]) > 10
    for found, expected in zip(model.parameters, qwen.ours.parameters, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.slow
def test_layers_that_predict_several_tokens_are_not_read(tmp_path):
    pair = Pair(tmp_path, "glm4_moe", FAMILIES["glm4_moe"])
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.eh_proj.weight": np.zeros(3, "float32")}, file)
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    for found, expected in zip(model.parameters, pair.ours.parameters, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.slow
def test_workers_share_experts(tmp_path):
    """Two stages of two shards, each of which has half of every expert."""
    fields = FAMILIES["qwen3_moe"] | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
    }
    theirs = write_checkpoint(tmp_path, "qwen3_moe", fields)
    (tokens,) = random_tokens(5, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    with ParallelModel.from_pretrained(
        tmp_path, "float32", page_size=PAGE_SIZE, threads=True, num_shards=2, stages=2
    ) as model:
        cache = model.create_cache(1, 64, 64)
        cache.add_sequence(0)
        found = np.concatenate(model.logits(cache, [0], [tokens]))
    assert_close(found, expected)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
