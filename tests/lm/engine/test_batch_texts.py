# SPDX-License-Identifier: Apache-2.0
"""A text does not depend on what else is generated with it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate

from ...support.harness.selections import all_slow_but

PROMPTS = [
    "The with statement",
    "A list is",
    "x",
    "The yield expression is used when defining",
    "In Python, a class",
    "Import",
    "Exceptions are raised when an error",
    "The value of the expression is an object that is bound to the name in the ",
]
TYPES = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "float32", "weights": "int8"},
    "int4 weights and pages": {"dtype": "float32", "weights": "int4", "kv_dtype": "int4"},
    "int8 pages": {"dtype": "bfloat16", "weights": "int4", "kv_dtype": "int8"},
}


OFTEN = ("float32", "bfloat16", "int4 weights and pages")


@pytest.fixture(scope="module", params=all_slow_but(TYPES, *OFTEN))
def model(request) -> DecoderModel:
    return DecoderModel.from_pretrained(**TYPES[request.param])


def test_texts_are_those_of_prompts_alone(model):
    params = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=60, seed=3)

    def texts(prompts: list[str]) -> list[tuple[int, ...]]:
        events = generate(model, prompts, params)
        finished = {e.prompt: e.tokens for e in events if isinstance(e, FinishedEvent)}
        return [finished[i] for i in range(len(prompts))]

    alone = [texts([prompt])[0] for prompt in PROMPTS]
    assert texts(PROMPTS) == alone
    assert texts(PROMPTS[::-1]) == alone[::-1]


def test_logits_have_the_bits_of_those_alone(model):
    """Steps with prompts beside decoded rows, whose sequences are long enough to be cut."""
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, 256, n).tolist() for n in (330, 90, 1, 40)]

    def logits(cache, turns) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for parts in turns:
            for i in parts:
                if i not in found:
                    cache.add_sequence(i)
                    found[i] = []
            rows = model.prefill(cache, list(parts), list(parts.values()))
            for i, row in zip(parts, rows, strict=True):
                found[i].append(row.tobytes())
        return found

    expected: dict[int, list[bytes]] = {}
    for i, prompt in enumerate(tokens):
        cache = model.create_cache(max_num_sequences=1, max_total_tokens=400)
        expected |= logits(cache, [{i: prompt}, {i: [7]}, {i: [8, 9]}])
    cache = model.create_cache(max_num_sequences=4, max_total_tokens=1024)
    turns = [
        {2: tokens[2], 0: tokens[0]},
        {0: [7], 1: tokens[1], 2: [7]},
        {3: tokens[3], 2: [8, 9], 1: [7], 0: [8, 9]},
        {1: [8, 9], 3: [7]},
        {3: [8, 9]},
    ]
    assert logits(cache, turns) == expected
