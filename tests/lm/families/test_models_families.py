# SPDX-License-Identifier: Apache-2.0
"""Logits of small random models of every family, step by step, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel, ParallelModel, SamplingParams, generate  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    assert_close,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import all_slow_but, latin_square, with_slow  # noqa: E402

# Alike wherever it does not matter, so that most kernels are compiled once.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
NARROW = HEADS | {"hidden_size": 48, "intermediate_size": 80}  # heads wider than the residual
WIDE = HEADS | {"hidden_size": 64, "intermediate_size": 80}
LONG_FROM = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": LONG_FROM,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 15.0, 24.0],
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
FAMILIES = {
    "qwen2": WIDE
    | {
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": NARROW,
    "gemma2": NARROW
    | {
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": NARROW
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "query_pre_attn_scalar": 10,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": DEFAULT,
        },
    },
    "phi3": WIDE
    | {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": LONG_FROM,
        "tie_word_embeddings": True,
    },
    "olmo2": WIDE,
    "olmo3": WIDE
    | BOTH_KINDS
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": DEFAULT,
        },
    },
    "smollm3": WIDE | {"rope_parameters": DEFAULT, "no_rope_layers": [1, 0]},
    "cohere2": WIDE | BOTH_KINDS | {"rope_parameters": DEFAULT, "logit_scale": 0.25},
    "exaone4": NARROW | BOTH_KINDS | {"rope_parameters": DEFAULT},
    "ministral3": WIDE | {"rope_parameters": GROWING},
}
SLOW_COHERE2 = pytest.param("cohere2", marks=pytest.mark.slow)
# What makes a family what it is: with another value the logits must be others, or the tests of
# the family would not notice it.
OTHER_VALUES = [
    ("qwen2", {"sliding_window": 256}),
    ("gemma2", {"sliding_window": 256}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"sliding_window": 256}),
    ("gemma3_text", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"rope_parameters": {
        "full_attention": DEFAULT, "sliding_attention": DEFAULT,
    }}),
    ("phi3", {"rope_parameters": LONGROPE | {"long_factor": LONGROPE["short_factor"]}}),
    ("phi3", {"rope_parameters": LONGROPE | {"attention_factor": 1.0}}),
    ("olmo3", {"sliding_window": 256}),
    ("olmo3", {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}}),
    ("smollm3", {"no_rope_layers": [1, 1]}),
    ("smollm3", {"no_rope_layers": [0, 0]}),
    ("cohere2", {"sliding_window": 256}),
    ("cohere2", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 256}),
    ("cohere2", {"logit_scale": 1.0}),
    ("exaone4", {"sliding_window": 256}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("ministral3", {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}}),
    ("ministral3", {"rope_parameters": GROWING | {"mscale": 0.5}}),
    ("ministral3", {"sliding_window": 7}),
]  # fmt: skip


SLOW = ("qwen3", "olmo2", "exaone4")  # whose parts others have


@pytest.fixture(scope="module", params=with_slow(FAMILIES, *SLOW))
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks", "batch"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


def test_hits(pair):
    """A prompt that begins as a removed one continues behind its pages, in layers of all kinds."""
    tokens, own = random_tokens(3, 30, 8)
    cache = pair.cache(use_long_rope_factors=True)
    cache.add_sequence(0, tokens)
    pair.ours.prefill(cache, [0], [tokens])
    cache.record_tokens(0, tokens)
    cache.remove_sequence(0)
    prompt = [*tokens, *own]
    reused = cache.add_sequence(1, prompt)
    assert reused == 30
    logits = pair.ours.logits(cache, [1], [prompt[reused:]])[0]
    assert_close(logits, pair.expected(prompt)[reused:])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo3", "smollm3", "cohere2", "exaone4"])
def test_int8_pages_are_close(family, tmp_path):
    theirs = write_checkpoint(tmp_path, family, FAMILIES[family])
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE, kv_dtype="int8")
    (tokens,) = random_tokens(0, 41)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found = [model.logits(cache, [0], [chunk])[0] for chunk in np.split(tokens, [5, 18, 40])]
    error = np.concatenate(found) - expected
    assert 0 < error.std() < 0.05 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smollm3", "cohere2"])
def test_with_rotation_when_rows_are_read(family, tmp_path):
    """As models run whose sequences may have windows: RoPE inline beside layers without it."""
    theirs = write_checkpoint(tmp_path, family, FAMILIES[family])
    model = DecoderModel.from_pretrained(
        tmp_path, "float32", page_size=PAGE_SIZE, sliding_window=True
    )
    (tokens,) = random_tokens(0, 30)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found = [model.logits(cache, [0], [chunk])[0] for chunk in np.split(tokens, [5, 18, 29])]
    assert_close(np.concatenate(found), expected)


@pytest.mark.parametrize(("family", "other"), OTHER_VALUES, ids=str)
def test_the_checkpoints_show_what_is_special(family, other, tmp_path):
    tokens = torch.tensor([list(random_tokens(0, 41)[0])])
    logits = []
    for fields in (FAMILIES[family], FAMILIES[family] | other):
        with torch.no_grad():
            logits.append(write_checkpoint(tmp_path, family, fields)(tokens).logits[0, 36:])
    assert (logits[0] - logits[1]).abs().max() > 0.05


# --- rotations that depend on the length ---------------------------------------------------------


@pytest.fixture(scope="module")
def phi(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("phi"), "phi3", FAMILIES["phi3"])


def test_longrope_as_transformers_with_its_cache(phi):
    """A step that ends beyond the original length takes the long factors; K stays as it was."""
    (tokens,) = random_tokens(1, LONG_FROM + 20)
    ours, theirs = phi.cache(), transformers.DynamicCache(config=phi.theirs.config)
    ours.add_sequence(0)
    for chunk in np.split(tokens, [20, LONG_FROM - 1, LONG_FROM, LONG_FROM + 1, LONG_FROM + 9]):
        with torch.no_grad():
            expected = phi.theirs(torch.tensor([list(chunk)]), past_key_values=theirs).logits[0]
        assert_close(phi.ours.logits(ours, [0], [chunk])[0], expected.numpy())


def test_generate_chooses_the_factors_of_longrope_once(phi):
    """So that a text does not depend on its chunks: greedy text is that of whole forwards."""
    for length, max_tokens in ((20, 12), (LONG_FROM + 8, 5)):
        (tokens,) = random_tokens(2, length)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        for chunk in (7, 512):
            *_, finished, _ = generate(
                phi.ours, [tokens], params, prefill_chunk_size=chunk, num_speculative_tokens=0
            )
            text = [*tokens.tolist(), *finished.tokens]
            best = phi.expected(text).argmax(-1)
            assert best[length - 1 : len(text) - 1].tolist() == text[length:]


DYNAMIC = WIDE | {
    "max_position_embeddings": 48,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def test_dynamic_rotation_within_its_length(tmp_path):
    pair = Pair(tmp_path, "llama", DYNAMIC)
    CHECKS["prefill, decode"](pair, 0)
    (tokens,) = random_tokens(0, 49)
    cache = pair.cache()
    cache.add_sequence(3)
    pair.ours.prefill(cache, [3], [tokens[:46]])
    reason = r"sequence 3 would have 49 positions; a dynamic rotation holds for 48 \(max_position"
    with pytest.raises(ValueError, match=reason):
        pair.ours.prefill(cache, [3], [tokens[46:]])
    # A token tree counts by its depth: 46 + 2.
    pair.ours.logits(cache, [3], [tokens[46:49]], [[-1, 0, 0]])
    cache.commit_tree([3], [2])
    with pytest.raises(ValueError, match=reason):
        pair.ours.decode(cache, [3], tokens[:1])
    assert cache.sequence_length(3) == 48
    for load, options in (
        (DecoderModel.from_pretrained, {"sliding_window": True}),
        (ParallelModel.from_pretrained, {"stages": 2}),
    ):
        with pytest.raises(ValueError, match="dynamic rotation"):
            load(tmp_path, **options)


# --- other ways to run them ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma"), "gemma2", FAMILIES["gemma2"])


def test_bfloat16_is_close(tmp_path):
    """Scaled embeddings, norms of all kinds and GELU, over kernels that the Llama tests use too."""
    fields = NARROW | {
        "num_attention_heads": 6,
        "initializer_range": 0.1,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), DEFAULT),
    }
    theirs = write_checkpoint(tmp_path, "gemma3_text", fields)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tokens,) = random_tokens(4, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    model = DecoderModel.from_pretrained(tmp_path, page_size=PAGE_SIZE)
    assert model.options.dtype == "bfloat16"  # as config.json says
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    found = model.logits(cache, [0], [tokens])[0]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_drafts_change_no_text(gemma):
    """Token trees in layers with and without windows."""
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(temperature=0, max_tokens=30)
    texts = []
    for num_drafts in (0, 4):
        *_, finished, _ = generate(gemma.ours, [prompt], params, num_speculative_tokens=num_drafts)
        texts.append(finished.tokens)
    assert texts[0] == texts[1] and len(texts[0]) == 30


def test_workers_share_a_model(tmp_path):
    """Two stages of two shards, each of which has the heads of the other tests' models."""
    fields = FAMILIES["gemma2"] | {"num_attention_heads": 8, "num_key_value_heads": 4}
    theirs = write_checkpoint(tmp_path, "gemma2", fields)
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


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2", SLOW_COHERE2])
@latin_square(2, "family", "stages")
@pytest.mark.parametrize("stages", [1, 2])
def test_prompts_reuse_pages_of_layers_with_windows(family, stages, tmp_path):
    """The windows of some prompts are gone when others begin; stages differ in what they have."""
    write_checkpoint(tmp_path, family, FAMILIES[family])
    options = {"page_size": PAGE_SIZE}
    if stages == 1:
        model = DecoderModel.from_pretrained(tmp_path, "float32", **options)
    else:
        options |= {"stages": stages, "threads": True}
        model = ParallelModel.from_pretrained(tmp_path, "float32", **options)
    base, *tails = random_tokens(7, 40, 1, 9, 5, 30, 2)
    prompts = [
        [*base[:size], *tail] for size, tail in zip((40, 40, 23, 30, 40), tails, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=10)
    for capacity in ({}, {"max_num_sequences": 2}, {"max_total_tokens": 128}):
        texts = []
        for prefix_cache in (False, True):
            *events, statistics = generate(
                model, prompts, params, prefill_chunk_size=16, prefix_cache=prefix_cache, **capacity
            )
            texts.append({e.prompt: e.tokens for e in events if hasattr(e, "finish_reason")})
        assert texts[0] == texts[1] and len(texts[0]) == 5
        assert statistics.reused_tokens >= 20
    if stages > 1:
        model.close()


def test_workers_do_not_share_norms_over_all_heads(tmp_path):
    write_checkpoint(tmp_path, "olmo2", FAMILIES["olmo2"])
    with pytest.raises(ValueError, match="num_shards must be 1: the model normalizes Q and K over"):
        ParallelModel.from_pretrained(tmp_path, num_shards=2)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
