# SPDX-License-Identifier: Apache-2.0
"""Models whose results have the same bits in every batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.target import Target

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate
from tvm_pagedkv_lm.config.options import BuildOptions, check_batch_invariant
from tvm_pagedkv_lm.kernels.linear.amx.tile_code_sums import TileCodeSums
from tvm_pagedkv_lm.kernels.linear.amx.tile_products import TileProducts
from tvm_pagedkv_lm.kernels.linear.packed import packed_matrix
from tvm_pagedkv_lm.kernels.linear.products import products_for

TILES = (TileProducts, TileCodeSums)
# Tokens with which all prompts begin; the context holds 512.
COMMON = 480


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained(None, "float32", batch_invariant=True)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    common = rng.integers(3, 256, COMMON).tolist()
    return [common + rng.integers(3, 256, 2 + i).tolist() for i in range(8)]


def test_texts_that_begin_alike(model):
    params = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=12, seed=3)

    def texts(prompts: list[list[int]]) -> list[tuple[int, ...]]:
        events = generate(model, prompts, params)
        found = {each.prompt: each.tokens for each in events if isinstance(each, FinishedEvent)}
        return [found[i] for i in range(len(prompts))]

    prompts = _prompts()
    assert texts(prompts) == [texts([prompt])[0] for prompt in prompts]


def test_generate_makes_caches_without_shared_reads(model, monkeypatch):
    create, made = model._caches._create, []

    def record(config, *others):
        made.append(config)
        return create(config, *others)

    monkeypatch.setattr(model._caches, "_create", record)
    assert [*generate(model, ["x"], SamplingParams(max_tokens=1))]
    assert [bool(config["share_prefix"]) for config in made] == [False]


def test_logits_behind_shared_pages(model):
    prompts = _prompts()

    def steps(parts: list[list[int]]) -> list[list[bytes]]:
        cache = model.create_cache(8, 2048, 1024)
        cache.add_sequence(0)
        model.prefill(cache, [0], [parts[0][:COMMON]])
        for i in range(1, len(parts)):
            cache.fork_sequence(0, i, COMMON)
        ids = list(range(len(parts)))
        rows = [model.prefill(cache, ids, [part[COMMON:] for part in parts])]
        rows += [model.decode(cache, ids, [token] * len(ids)) for token in (7, 8)]
        return [[row[i].tobytes() for row in rows] for i in ids]

    assert steps(prompts) == [steps([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_linear_layers_never_use_tiles(format):
    amx = BuildOptions("bfloat16", 16, Target({"kind": "llvm", "mcpu": "sapphirerapids"}))
    vectors = replace(amx, batch_invariant=True)
    assert isinstance(_products(amx, format), TILES)
    assert not isinstance(_products(vectors, format), TILES)
    assert amx.precision != vectors.precision


def _products(options: BuildOptions, format: str | None):
    formats = () if format is None else (("w", format),)
    options = replace(options, formats=formats)
    return products_for(packed_matrix("w", 128, 128, options), "bfloat16")


def test_what_cannot_hold_is_refused(model):
    with pytest.raises(ValueError, match="cannot be combined with attention_budget"):
        DecoderModel.from_pretrained(None, attention_budget=64, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant must be a bool, got 1"):
        check_batch_invariant(model.config, 1)
