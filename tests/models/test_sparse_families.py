# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models that attend to chosen positions, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv.generation import FinishedEvent, SamplingParams, generate  # noqa: E402
from tvm_pagedkv.models import DecoderModel, ParallelModel, config_from_fields  # noqa: E402

from ..support.family_checks import (  # noqa: E402
    check_another_value_matters,
    check_prompts_that_begin_alike,
)
from ..support.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    assert_close,
    random_tokens,
)
from ..support.selections import all_slow_but  # noqa: E402
from .test_latent_families import EXPERTS, LATENT, YARN  # noqa: E402

# With few heads many positions have a score of exactly 0, of which transformers takes any.
INDEXER = {"index_n_heads": 12, "index_head_dim": 24, "index_topk": 7}
BOTH = LATENT | EXPERTS | INDEXER | {"num_hidden_layers": 3, "mlp_layer_types": None}
FAMILIES = {
    "deepseek_v32": BOTH | {"first_k_dense_replace": 1, "rope_parameters": YARN},
    "glm_moe_dsa": BOTH | {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "full"]},
}
QUICK = ("glm_moe_dsa",)


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
@pytest.mark.parametrize("family", FAMILIES)
def test_the_choice_matters(family, tmp_path):
    check_another_value_matters(tmp_path, family, FAMILIES[family], {"index_topk": 40})


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
    assert config.indexer.layers == layers
    kinds = ["index" if index in layers else "linear" for index in range(6)]
    assert [layer.kind for layer in config.layers] == sum((["mla", kind] for kind in kinds), [])
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
    ],
)
def test_fields_are_checked(family, changes, message):
    fields = FAMILIES[family] | {"vocab_size": 9, "model_type": family}
    with pytest.raises(ValueError, match=message):
        config_from_fields(fields | changes)


def test_stages_begin_with_a_layer_that_chooses():
    fields = FAMILIES["glm_moe_dsa"] | {"vocab_size": 9, "model_type": "glm_moe_dsa"}
    config = config_from_fields(fields)
    config.indexer.check_stages((0, 2, 3))
    with pytest.raises(ValueError, match="may not begin with layer 1, which attends to the posi"):
        config.indexer.check_stages((0, 1, 3))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
