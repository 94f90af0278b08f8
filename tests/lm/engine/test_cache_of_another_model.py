# SPDX-License-Identifier: Apache-2.0
"""A cache serves the model that made it: the prefixes of another one would be another text's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

import tvm_pagedkv as pkv
from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate
from tvm_pagedkv_lm.model.caches import cache_config
from tvm_pagedkv_lm.model.source import TINY

PROMPT = "The value of the expression is an object. " * 3
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory) -> DecoderModel:
    """The same model with other weights."""
    folder = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("fine-tuned") / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("v_proj.weight"))
    save_file(tensors | {name: tensors[name] * 2}, folder / "model.safetensors")
    return DecoderModel.from_pretrained(folder)


def tokens_of(model: DecoderModel, cache: pkv.KVCache) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt it reused."""
    *_, finished, statistics = generate(model, [PROMPT], GREEDY, cache=cache)
    assert isinstance(finished, FinishedEvent)
    return finished.tokens, statistics.reused_tokens


def test_the_same_files_are_the_same_model(model, tmp_path):
    copy = DecoderModel.from_pretrained(shutil.copytree(TINY, tmp_path / "copy"))
    cache = model.create_cache(4, 1024)
    expected, _ = tokens_of(model, cache)
    tokens, num_reused = tokens_of(copy, cache)
    assert tokens == expected and num_reused > 0


def test_other_weights(model, fine_tuned):
    cache = model.create_cache(4, 1024)
    tokens_of(model, cache)
    for prefix_cache in (True, False):
        with pytest.raises(ValueError, match="cache must be one that this model has made"):
            generate(fine_tuned, [PROMPT], cache=cache, prefix_cache=prefix_cache)
    tokens_of(fine_tuned, fine_tuned.create_cache(4, 1024))


def test_other_types(model):
    cache = DecoderModel.from_pretrained(weights="int8").create_cache(4, 1024)
    with pytest.raises(ValueError, match="cache must be one that this model has made"):
        generate(model, [PROMPT], cache=cache)


def test_what_no_model_has_made(model):
    config = cache_config(model.config, model.options, (4, 1024, 64))
    for cache in (pkv.create(config), "cache", 0):
        with pytest.raises(ValueError, match="cache must be one that this model has made"):
            generate(model, [PROMPT], cache=cache)


def test_models_without_files():
    """Nothing names their weights, so each of them takes its own caches only."""
    made = DecoderModel.from_pretrained()
    parts = made.config, made.options, made.library, made.parameters, made.tokenizer
    one, other = DecoderModel(*parts), DecoderModel(*parts)
    cache = one.create_cache(4, 1024)
    tokens_of(one, cache)
    with pytest.raises(ValueError, match="cache must be one that this model has made"):
        generate(other, [PROMPT], cache=cache)
