# SPDX-License-Identifier: Apache-2.0
"""What ``config.json`` leaves out, spells twice or names in vain, as transformers reads it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

from tir_kernels.semantics.rope import RopeTable, inverse_frequencies  # noqa: E402
from tir_kernels.spec import RopeSpec  # noqa: E402
from tvm_pagedkv import RopeConfig  # noqa: E402
from tvm_pagedkv_lm import DecoderConfig, DecoderModel, config_from_fields  # noqa: E402
from tvm_pagedkv_lm.blocks.latent import LatentAttention  # noqa: E402
from tvm_pagedkv_lm.blocks.moe import MixtureOfExperts  # noqa: E402
from tvm_pagedkv_lm.families.registry import FAMILIES  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    assert_close,
    random_tokens,
    write_checkpoint,
)
from ..families.test_hybrid_families import FAMILIES as HYBRIDS  # noqa: E402
from ..families.test_models_families import FAMILIES as DENSE  # noqa: E402
from ..families.test_models_families import WIDE  # noqa: E402
from ..families.test_moe_families import FAMILIES as WITH_EXPERTS  # noqa: E402
from .test_models_config import OWN_FIELDS, SHAPE  # noqa: E402

TEXT_MODELS = {
    family.model_type: name for name, family in FAMILIES.items() if name.endswith("CausalLM")
}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")


def both(model_type: str, **fields) -> tuple[DecoderConfig, transformers.PreTrainedConfig]:
    """Our configuration and that of transformers, of the same fields."""
    name = TEXT_MODELS[model_type]
    fields = SHAPE | OWN_FIELDS.get(name, {}) | fields
    ours = config_from_fields({"architectures": [name], **fields})
    return ours, transformers.AutoConfig.for_model(model_type, **copy.deepcopy(fields))


def table_of(rope: RopeConfig) -> RopeTable:
    """Frequencies and factor of a rotation of short texts."""
    return inverse_frequencies(RopeSpec(rope.theta, rope.scale, rope.rotary_dim, rope.scaling))


# --- fields that a file leaves out ---------------------------------------------------------------


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_defaults(model_type):
    """Epsilons, windows, bases of rotations and the choice of experts are those of transformers."""
    ours, theirs = both(model_type)
    epsilon = next(getattr(theirs, name) for name in EPSILONS if hasattr(theirs, name))
    assert ours.norm_eps == epsilon
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    is_latent = ours.find(LatentAttention) is not None
    if not is_latent and model_type not in ("mamba2", "gemma4_text"):
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // 4
        assert ours.head_dim == head_dim
    rotations = getattr(theirs, "rope_parameters", None) or {}
    for layer in {x for x in ours.cache_layers if x.rope is not None and x.rope.mode != "none"}:
        kind = "sliding_attention" if layer.window else "full_attention"
        assert layer.rope.theta == rotations.get(kind, rotations)["rope_theta"]
    windows = {layer.window for layer in ours.cache_layers if layer.kind == "mha_sliding"}
    assert windows <= {getattr(theirs, "sliding_window", None)}
    mixture = ours.find(MixtureOfExperts)
    if mixture is not None:
        experts = mixture.experts
        assert experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)
        assert experts.num_chosen == theirs.num_experts_per_tok
        if getattr(theirs, "n_group", None) and model_type != "mistral4":
            groups = experts.num_groups, experts.num_chosen_groups
            assert groups == (theirs.n_group, theirs.topk_group)


@pytest.mark.parametrize("model_type", ["gpt_oss", "ministral3", "mistral4"])
def test_default_scaling_of_the_rotation(model_type):
    ours, theirs = both(model_type)
    given, _ = both(model_type, rope_parameters=copy.deepcopy(theirs.rope_parameters))
    found, expected = (table_of(config.cache_layers[-1].rope) for config in (ours, given))
    np.testing.assert_array_equal(found.inv_freq, expected.inv_freq)
    assert found.attention_factor == expected.attention_factor
    ours, given = ours.layers[-1].attention, given.layers[-1].attention
    assert replace(ours, spec=given.spec) == given


def test_default_window_of_mistral():
    ours, theirs = both("mistral")
    assert {layer.window for layer in ours.cache_layers} == {theirs.sliding_window} == {4096}
    ours, _ = both("mistral", sliding_window=None)
    assert {layer.window for layer in ours.cache_layers} == {None}


# --- fields of the rotation ----------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
PLAIN = {"rope_type": "default", "rope_theta": 1e3}
ROTATIONS = {
    "of older files": {"rope_theta": 1e5, "rope_scaling": YARN},
    "type": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "both spellings": {"rope_scaling": YARN, "rope_parameters": PLAIN},
    "both bases": {"rope_theta": 1e5, "rope_parameters": PLAIN},
    "yarn, magnitudes": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn, one magnitude": {"rope_scaling": YARN | {"mscale_all_dim": 0.7}},
    "yarn, not rounded": {"rope_scaling": YARN | {"truncate": False, "beta_fast": 3.3}},
    "yarn, no factor": {"rope_scaling": YARN | {"factor": None}},
    "yarn, no length": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, length beside": {"rope_scaling": YARN, "original_max_position_embeddings": 256},
    "llama3, no length": {"rope_scaling": LLAMA3},
    "llama3, length beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 256},
    "longrope, length beside": {
        "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 256,
    },
    "longrope, factor": {
        "rope_scaling": LONGROPE | {"factor": 3.0, "original_max_position_embeddings": 64}
    },
}


@pytest.mark.parametrize("model_type", ["llama", "phi3", "granitemoehybrid"])
def test_a_dynamic_rotation_bounds_texts(model_type):
    fields = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    name = TEXT_MODELS[model_type]
    fields |= SHAPE | OWN_FIELDS.get(name, {}) | {"position_embedding_type": "rope"}
    assert config_from_fields({"architectures": [name], **fields}).longest_text == 4096


@pytest.mark.parametrize("fields", ROTATIONS.values(), ids=ROTATIONS)
def test_rotations(fields):
    ours, theirs = both("llama", **fields)
    rope, expected = ours.cache_layers[0].rope, LlamaRotaryEmbedding(theirs)
    found = table_of(rope)
    np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=2e-6)
    assert found.attention_factor == pytest.approx(expected.attention_scaling)


# --- fields that only seem to matter, or only seem not to ----------------------------------------

LOGITS = {
    "llama has no window": ("llama", WIDE | {"sliding_window": 7, "use_sliding_window": True}),
    "qwen3_moe has a window in all layers": (
        "qwen3_moe",
        WITH_EXPERTS["qwen3_moe"] | {"use_sliding_window": True, "sliding_window": 7},
    ),
    "gemma3 has no soft-cap of attention": (
        "gemma3_text",
        DENSE["gemma3_text"] | {"attn_logit_softcapping": 2.0},
    ),
    "lfm2 has an epsilon of its own": ("lfm2", HYBRIDS["lfm2"] | {"norm_eps": 0.2}),
    "granite without a factor of attention": (
        "granitemoehybrid",
        HYBRIDS["granitemoehybrid"] | {"attention_multiplier": None},
    ),
}


@pytest.mark.parametrize(("model_type", "fields"), LOGITS.values(), ids=LOGITS)
def test_logits(model_type, fields, tmp_path):
    CHECKS["chunks"](Pair(tmp_path, model_type, fields), 0)


def test_a_matrix_for_the_logits_counts(tmp_path):
    """Fine-tuned models may have one, and still the ``tie_word_embeddings`` of their base."""
    write_checkpoint(tmp_path, "llama", WIDE)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    assert not ours.config.tied_embeddings
    (tokens,) = random_tokens(0, 9)
    cache = ours.create_cache(1, 64, 64)
    cache.add_sequence(0)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0]
    assert_close(ours.logits(cache, [0], [tokens])[0], expected)


PARTIAL = {"partial_rotary_factor": 0.5}
REFUSED = [
    ("llama", PARTIAL, "partial_rotary_factor must be 1 in models of this kind, got 0.5"),
    ("qwen2", {"rope_parameters": PLAIN | PARTIAL}, "partial_rotary_factor must be 1"),
    ("llama", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config is supported in Ge"),
    ("smollm3", {"sliding_window": 7, "layer_types": ["sliding_attention"] * 6},
     "layer_types has windows, which use_sliding_window disables"),
    ("gemma3_text", {"rope_parameters": PLAIN}, "must have an object for full_attention and sl"),
    ("deepseek_v32", {"rope_interleave": False}, "rope_interleave must be true in models of"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave must be true"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED)
def test_what_engines_disagree_about_is_refused(model_type, fields, message):
    name = TEXT_MODELS[model_type]
    with pytest.raises(ValueError, match=message):
        config_from_fields({"architectures": [name]} | SHAPE | OWN_FIELDS.get(name, {}) | fields)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
