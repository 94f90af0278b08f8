# SPDX-License-Identifier: Apache-2.0
"""Memory over requests: what malloc has handed out does not grow with them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import Conversation, DecoderModel, SamplingParams, generate

from ...support.harness.heap import bytes_in_use

LIMIT = 1 << 19


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


@pytest.mark.parametrize("caches", ["own", "shared"])
def test_prompts_of_many_lengths(model, caches):
    cache = model.create_cache(32, 2048) if caches == "shared" else None
    draw = random.Random(5)

    def answer(length: int) -> None:
        prompt = [draw.randrange(97, 123) for _ in range(length)]
        for _ in generate(model, [prompt], SamplingParams(max_tokens=3), cache=cache):
            pass

    for length in (400, 20, 400, 200):
        answer(length)
    before = bytes_in_use()
    for length in draw.sample(range(20, 400), 25):
        answer(length)
    assert bytes_in_use() - before < LIMIT


def test_conversations(model):
    def talk(length: int) -> None:
        conversation = Conversation(model, SamplingParams(max_tokens=4), max_total_tokens=400)
        for _ in range(2):
            "".join(conversation.reply("A list is. " * length))

    for length in (15, 5, 15):
        talk(length)
    before = bytes_in_use()
    for length in range(1, 16):
        talk(length)
    assert bytes_in_use() - before < LIMIT


def test_models_that_come_and_go():
    """A library is loaded once; TVM would keep each copy until the process ends."""
    for _ in range(3):
        DecoderModel.from_pretrained()
    before = bytes_in_use()
    for _ in range(8):
        DecoderModel.from_pretrained()
    assert bytes_in_use() - before < 100_000


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
