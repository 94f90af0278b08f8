# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes of steps agree with a count from weights and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tvm_pagedkv.config import LayerSpec, RopeConfig
from tvm_pagedkv_lm import (
    DecoderConfig,
    DecoderModel,
    SamplingParams,
    config_from_directory,
    generate,
)
from tvm_pagedkv_lm.blocks.latent import LatentAttention
from tvm_pagedkv_lm.blocks.latent_choice import SparseLatentAttention
from tvm_pagedkv_lm.blocks.moe import MixtureOfExperts
from tvm_pagedkv_lm.config.expert_config import Experts
from tvm_pagedkv_lm.config.index_config import IndexConfig
from tvm_pagedkv_lm.config.latent_config import Latent
from tvm_pagedkv_lm.config.options import layer_budgets
from tvm_pagedkv_lm.families.layers import with_cache_layers
from tvm_pagedkv_lm.model.decoder_weights import weights
from tvm_pagedkv_lm.model.source import TINY
from tvm_pagedkv_lm.model.work import Work

from ... import reference

CONFIG = config_from_directory(TINY)


def _num_weights(config: DecoderConfig) -> int:
    """Count the weights of all matrices that multiply rows; the embedding table does not."""
    return sum(
        part.size
        for ours, weight in weights(config, range(config.num_layers))
        for part in weight.parts
        if weight.is_matrix and ours != "embed_tokens"
    )


def _layer(window: int | None) -> LayerSpec:
    if window is None:
        return LayerSpec()
    return LayerSpec("mha_sliding" if window > 0 else "mha_chunked", abs(window))


def _with_windows(*windows: int | None) -> DecoderConfig:
    """The included model with a window for each of its layers; negative: chunks."""
    return with_cache_layers(CONFIG, [_layer(window) for window in windows])


def _with_parts(count: int, **parts: object) -> DecoderConfig:
    """The included model with other parts in each of `count` layers."""
    return replace(CONFIG, layers=(replace(CONFIG.layers[0], **parts),) * count)


@pytest.mark.parametrize("windows", [(None,) * 4, (1,) * 4, (5, None, 5, -3)], ids=str)
def test_flops_are_those_of_weights_and_masks(windows):
    config = _with_windows(*windows)
    chunks = [(0, 7), (12, 1), (3, 4)]
    pairs = 0
    for past, rows in chunks:
        q, k = np.ogrid[past : past + rows, : past + rows]
        for window in windows:
            pairs += int(np.sum((k <= q) & (k >= reference.first_seen(q, window))))
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.num_heads * config.head_dim * pairs
    rows = 12
    expected = 2 * (_num_weights(config) - head) * rows + 2 * head * 3 + attention
    assert Work(config, 4).flops(chunks, 3) == expected


@pytest.mark.parametrize("windows", [(None,) * 4, (8, None, 30, 8)], ids=str)
def test_bytes_are_those_of_weights_and_rows(windows):
    """Two texts of 60 and 20 tokens that share 10."""
    config = _with_windows(*windows)
    rows = {None: 70, 8: 16, 30: 50}
    numbers = 2 * config.num_kv_heads * config.head_dim * sum(rows[window] for window in windows)
    found = Work(config, 2).num_bytes(70, [60, 20])
    assert found == 2 * (_num_weights(config) + numbers)


def test_latent_rows_are_read_once():
    """One row per position is K and V of all heads, which multiply all of it and its V part."""
    shape = Latent(rank=32, rope_dim=8, nope_dim=16, v_dim=24)
    attention = LatentAttention(CONFIG.num_heads, shape, shape.layer(RopeConfig()), 1.0)
    config = _with_parts(4, attention=attention)
    work, rows = Work(config, 2), 70
    assert work.num_bytes(rows, [60, 20]) == 2 * (_num_weights(config) + 4 * 40 * rows)
    head = config.vocab_size * config.hidden_size
    attention = 4 * 2 * config.num_heads * (40 + 32) * 8
    assert work.flops([(7, 1)], 1) == 2 * (_num_weights(config) - head) + 2 * head + attention
    assert Work(config, 2, "int8").position_bytes[0] == 40 + 2 * 4  # scales of V and of the rest


def test_rows_attend_to_what_an_indexer_chooses():
    """Five positions at most, in two layers; the indexer of one reads all of its keys."""
    shape = Latent(rank=32, rope_dim=8, nope_dim=16, v_dim=24, q_rank=16)
    index = IndexConfig(3, 24, 5, is_interleaved=False)
    spec = replace(shape.layer(RopeConfig()), lists=True)
    chooses = SparseLatentAttention(CONFIG.num_heads, shape, spec, 1.0, index=index)
    follows = replace(chooses, index=replace(index, chooses=False))
    layers = (replace(CONFIG.layers[0], attention=each) for each in (chooses, follows))
    config = replace(CONFIG, layers=tuple(layers))
    work, rows = Work(config, 2), 70
    numbers = 2 * 40 * (5 + 5) + 24 * rows
    assert work.num_bytes(rows, [60, 20]) == 2 * (_num_weights(config) + numbers)
    head = config.vocab_size * config.hidden_size
    attention = 2 * 2 * config.num_heads * (40 + 32) * (4 + 5 + 5)
    index = 2 * 3 * 24 * (4 + 5 + 6)
    products = 3 * 2 * (_num_weights(config) - head)
    assert work.flops([(3, 3)], 1) == products + 2 * head + attention + index


def test_decode_within_a_budget_reads_some_pages_and_the_bounds_of_all():
    """Two texts of 60 and 20 tokens that share 10; three layers of four have the budget."""
    config, rows = _with_windows(8, None, None, None), 70
    work = Work(config, 2, budgets=layer_budgets(config, 32, 16), page_size=16)
    width = config.num_kv_heads * config.head_dim
    numbers = 2 * width * (16 + 3 * (32 + 20)) + 3 * width * 2 * rows / 16
    assert work.num_bytes(rows, [60, 20]) == 2 * (_num_weights(config) + numbers)
    whole = Work(config, 2)
    assert work.flops([(7, 3)], 1) == whole.flops([(7, 3)], 1)


def test_rows_need_some_of_the_experts():
    """Two of eight: a step of one row reads a quarter of their weights, one of five rows all."""
    config = _with_parts(4, mlp=MixtureOfExperts(Experts(8, 2, 96), CONFIG.layers[0].mlp))
    dense, expert = 2 * _num_weights(_with_parts(4, mlp=None)), 2 * 3 * 96
    dense += 2 * 4 * 8 * config.hidden_size  # routers
    expert *= 4 * config.hidden_size
    work = Work(config, 2)
    for rows, chosen in ((1, 2), (3, 6), (5, 8)):
        expected = dense + chosen * expert + work.position_bytes[0] * 4 * 7 * rows
        assert work.num_bytes(7 * rows, [7] * rows) == expected
    attention = 4 * 4 * config.num_heads * config.head_dim
    assert work.flops([(0, 1)], 1) == dense + 2 * expert + attention


def test_generation_counts_its_steps():
    """Two continuations of one prompt, whose K and V a step reads once; chunks of 8."""
    model, prompt = DecoderModel.from_pretrained(), [*range(1, 20)]
    params = SamplingParams(n=2, max_tokens=4)
    *_, statistics = generate(model, [prompt], params, prefill_chunk_size=8)
    work = Work(CONFIG, 4)
    assert statistics.prefill_flops == sum(
        work.flops([chunk], 1) for chunk in ((0, 8), (8, 8), (16, 3))
    )
    steps = statistics.decode_tokens // 2
    assert steps == 3
    read = sum(
        work.num_bytes(len(prompt) + 2 * (step + 1), [len(prompt) + step + 1] * 2)
        for step in range(steps)
    )
    assert statistics.decode_bytes == read


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
