# SPDX-License-Identifier: Apache-2.0
"""What steps have to compute and read, counted anew from weights and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tvm_pagedkv.generation import SamplingParams, generate
from tvm_pagedkv.models import LlamaModel, llama
from tvm_pagedkv.models.config import LlamaConfig
from tvm_pagedkv.models.model import TINY
from tvm_pagedkv.models.work import Work

CONFIG = LlamaConfig.from_directory(TINY)


def _num_weights(config: LlamaConfig) -> int:
    """Of all matrices that rows are multiplied with; the table of embeddings is not."""
    return sum(
        int(np.prod(shape))
        for ours, weight in llama.weights(config, range(config.num_layers))
        for _, shape in weight.parts
        if weight.is_matrix and ours != "embed_tokens"
    )


@pytest.mark.parametrize("window", [None, 1, 5])
def test_flops_are_those_of_weights_and_masks(window):
    config = replace(CONFIG, sliding_window=window)
    chunks = [(0, 7), (12, 1), (3, 4)]
    pairs = 0
    for past, rows in chunks:
        q, k = np.ogrid[past : past + rows, : past + rows]
        pairs += int(np.sum((k <= q) & (window is None or k > q - window)))
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    rows = 12
    expected = 2 * (_num_weights(config) - head) * rows + 2 * head * 3 + attention
    assert Work(config, 4).flops(chunks, 3) == expected


def test_bytes_are_those_of_weights_and_rows():
    row = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    assert Work(CONFIG, 2).num_bytes(100) == 2 * (_num_weights(CONFIG) + 100 * row)


def test_generation_counts_its_steps():
    """Two continuations of one prompt, whose K and V a step reads once; chunks of 8."""
    model, prompt = LlamaModel.from_pretrained(), [*range(1, 20)]
    params = SamplingParams(n=2, max_tokens=4)
    *_, statistics = generate(model, [prompt], params, prefill_chunk_size=8)
    work = Work(CONFIG, 4)
    assert statistics.prefill_flops == sum(
        work.flops([chunk], 1) for chunk in ((0, 8), (8, 8), (16, 3))
    )
    steps = statistics.decode_tokens // 2
    assert steps == 3
    read = sum(work.num_bytes(len(prompt) + 2 * (step + 1)) for step in range(steps))
    assert statistics.decode_bytes == read
