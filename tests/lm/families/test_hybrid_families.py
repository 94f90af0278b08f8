# SPDX-License-Identifier: Apache-2.0
"""Logits of small random hybrids, step by step, against transformers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from tvm_pagedkv_lm import Conversation, DecoderModel, SamplingParams, generate  # noqa: E402

from ...support.cases.models.family_checks import check_token_trees  # noqa: E402
from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    assert_close,
    check_chunks,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import all_slow_but, few_of, with_slow  # noqa: E402

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = HEADS | {"hidden_size": 64, "intermediate_size": 80}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
}
SSM = [0.9, 1.1, 0.8, 1.2, 0.7]
FACTORS = {
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": SSM,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 1.7,
}
DELTA = WIDE | {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": ROPE,
}
EXPERTS = {
    # With 0.3, transformers in float32 is further from itself in float64 than the tolerance.
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
KIMI = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 32,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "initializer_range": 0.25,
}
FAMILIES = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | {"initializer_range": 0.25},
    "qwen3_next": DELTA | EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]},
    "lfm2": WIDE
    | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "conv_bias": True},
    "mamba2": {
        "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24,
        "use_bias": True, "time_step_limit": [0.01, 0.9],
    },
    "falcon_h1": WIDE
    | MAMBA
    | FACTORS
    | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid": WIDE
    | MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "kimi_linear": KIMI,
}  # fmt: skip


# What makes a family what it is: with another value the logits must be others, or the tests of
# the family would not notice it.
OTHER_VALUES = [
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}),
    ("qwen3_5_text", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    ("qwen3_next", {"norm_topk_prob": True}),
    ("qwen3_next", {"mlp_only_layers": []}),
    ("qwen3_next", {"num_experts_per_tok": 2}),
    ("qwen3_5_moe_text", {"num_experts_per_tok": 2}),
    ("lfm2", {"layer_types": ["full_attention"] * 2}),
    ("lfm2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("mamba2", {"time_step_limit": [0.0, 9.0]}),
    ("falcon_h1", {"mamba_rms_norm": False}),
    ("falcon_h1", {"mamba_norm_before_gate": True}),
    *(("falcon_h1", {name: 1.0}) for name in FACTORS if name.endswith("multiplier")),
    ("falcon_h1", {"mlp_multipliers": [1.0, 1.3]}),
    ("falcon_h1", {"mlp_multipliers": [0.8, 1.0]}),
    *(
        ("falcon_h1", {"ssm_multipliers": [1.0 if j == i else x for j, x in enumerate(SSM)]})
        for i in range(5)
    ),
    ("granitemoehybrid", {"position_embedding_type": "rope"}),
    *(
        ("granitemoehybrid", {name: 1.0})
        for name in (
            "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
        )
    ),
    ("kimi_linear", {"layer_types": ["full_attention", "linear_attention"]}),
    ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"]}),
    ("kimi_linear", {"topk_group": 4}),
    ("kimi_linear", {"norm_topk_prob": False}),
    ("kimi_linear", {"routed_scaling_factor": 1.0}),
]  # fmt: skip
# Checkpoints of a family that the cases above do not have.
VARIANTS = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, normalized": ("qwen3_next", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "qwen3_5_text, one key head": ("qwen3_5_text", {"linear_num_key_heads": 1}),
    "falcon_h1, gate last": ("falcon_h1", {"mamba_norm_before_gate": True}),
    "falcon_h1, no norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_d_ssm": None}),
    "granitemoehybrid, rotated": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear, compressed Q": (
        "kimi_linear", {"q_lora_rank": 16, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "lfm2, no bias": ("lfm2", {"conv_bias": False, "block_auto_adjust_ff_dim": False}),
}  # fmt: skip


SLOW = (
    "qwen3_5_moe_text",
    "qwen3_next",
    "kimi_linear",
)  # they add to the code of others what VARIANTS has


@pytest.fixture(scope="module", params=with_slow(FAMILIES, *SLOW))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks", "forks", "pops"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


def test_token_trees(pair):
    check_token_trees(pair)


def test_hits_at_any_token(pair):
    """A prompt that leaves a removed one within a page continues from its state there."""
    tokens, own = random_tokens(3, 45, 8)
    for length in (45, 31, 18, 3):
        prompt = [*tokens[:length], *own]
        cache = pair.cache()
        cache.add_sequence(0, tokens)
        pair.ours.prefill(cache, [0], [tokens])
        cache.record_tokens(0, tokens)
        cache.remove_sequence(0)
        assert cache.add_sequence(1, prompt) == length
        logits = pair.ours.logits(cache, [1], [own])[0]
        assert_close(logits, pair.expected(prompt)[length:])


def test_hits_far_behind_the_end_of_a_text(pair):
    """The rows that convolutions need there are kept as K, V and ingredients are."""
    tokens, own = random_tokens(8, 200, 3)
    cache = pair.ours.create_cache(1, 256, 16)
    cache.add_sequence(0, tokens)
    for chunk in np.split(tokens, range(16, 200, 16)):
        pair.ours.prefill(cache, [0], [chunk])
    cache.record_tokens(0, tokens)
    cache.remove_sequence(0)
    for length in (31, 102):
        prompt = [*tokens[:length], *own]
        assert cache.add_sequence(1, prompt) == length
        logits = pair.ours.logits(cache, [1], [own])[0]
        assert_close(logits, pair.expected(prompt)[length:])
        cache.remove_sequence(1)
    cache.check_integrity()


def test_texts_do_not_depend_on_reuse_and_drafts(pair):
    base, *tails = random_tokens(7, 40, 1, 9, 5, 30, 2)
    lengths = (40, 39, 23, 30, 37)
    prompts = [[*base[:n], *tail] for n, tail in zip(lengths, tails, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=10)
    texts = []
    for options in (
        {"prefix_cache": False, "num_speculative_tokens": 0},
        {"prefix_cache": True, "num_speculative_tokens": 0},
        {"prefix_cache": True, "num_speculative_tokens": 4, "max_num_sequences": 2},
    ):
        *events, statistics = generate(pair.ours, prompts, params, prefill_chunk_size=16, **options)
        texts.append({e.prompt: e.tokens for e in events if hasattr(e, "finish_reason")})
        assert (statistics.reused_tokens >= 60) == options["prefix_cache"]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 5
    for prompt, text in zip(prompts, [texts[0][i] for i in range(5)], strict=True):
        best = pair.expected([*prompt, *text]).argmax(-1)
        assert tuple(best[len(prompt) - 1 : -1]) == tuple(text)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_turns_of_a_conversation_are_reused(pair, num_drafts):
    """Answers are those of a conversation that computes all of its text in every turn."""
    params = SamplingParams(temperature=0, max_tokens=9)
    warm = Conversation(pair.ours, params, max_total_tokens=200, num_speculative_tokens=num_drafts)
    cold = Conversation(pair.ours, params, max_total_tokens=200, prefix_cache=False)
    for message in ("w11", "w12", "w13"):
        before = warm.num_tokens()
        assert [*warm.reply(message)] and [*cold.reply(message)]
        assert warm.tokens == cold.tokens
        statistics = warm.last_turn.statistics
        assert statistics.reused_tokens >= before - 1
        assert statistics.pages_used <= statistics.pages_total
        warm.cache.check_integrity()


def test_quantized_attention_beside_states(qwen):
    """Only K and V are quantized; a fork within a page sees what the first sequence saw."""
    (tokens,) = random_tokens(6, 21)
    how = {"page_size": PAGE_SIZE, "kv_dtype": "int8"}
    model = DecoderModel.from_pretrained(qwen.folder, "float32", **how)
    cache = model.create_cache(2, 256, 64)
    cache.add_sequence(0)
    found = model.logits(cache, [0], [tokens])[0]
    expected = qwen.expected(tokens)
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    cache.fork_sequence(0, 1, 14)
    again = model.logits(cache, [1], [tokens[14:]])[0]
    assert_close(again, found[14:])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"weights": "int8"}], ids=str)
def test_kimi_linear_quantized(options, tmp_path):
    """Only latent rows are quantized beside states; experts may change where two are near."""
    fields = FAMILIES["kimi_linear"] | {"linear_head_dim": 32, "moe_intermediate_size": 64}
    theirs = write_checkpoint(tmp_path, "kimi_linear", fields)
    (tokens,) = random_tokens(6, 21)
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE, **options)
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found = np.concatenate([model.logits(cache, [0], [x])[0] for x in np.split(tokens, [7, 8])])
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    assert 0 < np.median(np.abs(found - expected)) < 0.1 * expected.std()


@pytest.mark.parametrize(
    "name",
    all_slow_but(VARIANTS, "kimi_linear"),
)
def test_variants(name, tmp_path):
    family, changes = VARIANTS[name]
    check_chunks(Pair(tmp_path, family, FAMILIES[family] | changes), 0)


@pytest.mark.parametrize(("family", "other"), OTHER_VALUES, ids=str)
def test_the_checkpoints_show_what_is_special(family, other, tmp_path):
    tokens = torch.tensor([list(random_tokens(0, 41)[0])])
    logits = []
    for fields in (FAMILIES[family], FAMILIES[family] | other):
        with torch.no_grad():
            logits.append(write_checkpoint(tmp_path, family, fields)(tokens).logits[0, 36:])
    assert (logits[0] - logits[1]).abs().max() > 0.05


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("qwen"), "qwen3_5_text", FAMILIES["qwen3_5_text"])


def test_a_checkpoint_with_pictures_is_read_as_text(qwen, tmp_path):
    """Its fields are in an object of their own, and its tensors have a longer prefix."""
    fields = json.loads((qwen.folder / "config.json").read_text())
    name = "Qwen3_5ForConditionalGeneration"
    fields |= {"dtype": "float16", "eos_token_id": [7, 8]}
    whole = {"architectures": [name], "model_type": "qwen3_5", "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(qwen.folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    save_file(renamed | {"model.visual.a": np.zeros(3, "float32")}, tmp_path / "model.safetensors")
    shutil.copy(qwen.folder / "tokenizer.json", tmp_path)
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    assert (model.config.dtype, model.config.eos_token_ids) == ("float16", (7, 8))
    for found, expected in zip(model.parameters, qwen.ours.parameters, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.slow
def test_experts_in_one_tensor(tmp_path):
    """As newer checkpoints have them: gate and up of all experts, and down of all."""
    pair = Pair(tmp_path, "qwen3_5_moe_text", FAMILIES["qwen3_5_moe_text"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{block}.{i}.{name}_proj.weight") for i in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{block}.gate_up_proj"] = np.concatenate([gate, up], 1)
        tensors[f"{block}.down_proj"] = down
    save_file(tensors, file)
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    for found, expected in zip(model.parameters, pair.ours.parameters, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize("family", few_of(["lfm2", "qwen3_5_text", "mamba2"], 1))
def test_bfloat16_is_close(family, tmp_path):
    theirs = write_checkpoint(tmp_path, family, FAMILIES[family] | {"initializer_range": 0.1})
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tokens,) = random_tokens(4, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    model = DecoderModel.from_pretrained(tmp_path, page_size=PAGE_SIZE)
    assert model.options.dtype == "bfloat16"
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found = model.logits(cache, [0], [tokens])[0]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_weights_in_8_bits_are_close(qwen):
    (tokens,) = random_tokens(4, 20)
    how = {"page_size": PAGE_SIZE, "weights": "int8"}
    model = DecoderModel.from_pretrained(qwen.folder, "float32", **how)
    assert ("layers.0.mixer.gates.weight", "int8") in model.options.formats
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found, expected = model.logits(cache, [0], [tokens])[0], qwen.expected(tokens)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
