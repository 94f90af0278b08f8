# SPDX-License-Identifier: Apache-2.0
"""One model in several threads, each with a cache of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import (
    Conversation,
    DecoderModel,
    FinishedEvent,
    ParallelModel,
    SamplingParams,
    generate,
)

PROMPTS = ["The with statement", "A list is", "import os", "The yield expression is used when"]


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


def write(model, index: int, **options) -> list[str]:
    """Continue a prompt in a cache of its own, at a temperature that shows wrong logits."""
    prompts, params = [PROMPTS[index % len(PROMPTS)]], SamplingParams(max_tokens=24, seed=index)
    events = generate(model, prompts, params, **options)
    return [event.text for event in events if isinstance(event, FinishedEvent)]


def in_threads(number: int, work) -> list:
    """Return what ``work(index)`` returns or raises in threads that begin together."""
    results: list = [None] * number
    begin = threading.Barrier(number)

    def run(index: int) -> None:
        begin.wait()
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 4}], ids=["plain", "drafts"])
def test_threads_write_what_one_thread_writes(model, options):
    expected = [write(model, index, **options) for index in range(6)]
    for _ in range(3):
        assert in_threads(6, lambda index: write(model, index, **options)) == expected


def test_conversations_of_several_threads(model):
    def talk(index: int) -> list[str]:
        conversation = Conversation(model, SamplingParams(max_tokens=12, seed=index))
        return ["".join(conversation.reply(prompt)) for prompt in PROMPTS]

    expected = [talk(index) for index in range(4)]
    assert in_threads(4, talk) == expected


def test_threads_that_come_and_go_keep_few_machines(model):
    expected = write(model, 1)
    for _ in range(4):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: write(model, 1), range(8))) == [expected] * 8
    assert len(model._machines._idle) <= 4


def test_a_text_whose_tokens_come_from_different_threads(model):
    """As an asyncio program gets them: each event in whatever thread is free."""

    async def stream(index: int) -> list[str]:
        prompt, params = PROMPTS[index], SamplingParams(max_tokens=24, seed=index)
        events = await asyncio.to_thread(generate, model, [prompt], params)
        texts = []
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            if isinstance(event, FinishedEvent):
                texts.append(event.text)
        return texts

    async def all_streams() -> list[list[str]]:
        return await asyncio.gather(*(stream(index) for index in range(4)))

    assert asyncio.run(all_streams()) == [write(model, index) for index in range(4)]


def test_an_error_in_one_thread_spoils_no_other(model):
    """The step fails in the middle: in a cache that is too small for it."""
    from tvm_pagedkv import CacheFullError

    def work(index: int):
        if index % 2 == 0:
            return write(model, index)
        cache = model.create_cache(1, 16)
        cache.add_sequence(0)
        for _ in range(20):
            with pytest.raises(CacheFullError):
                model.prefill(cache, [0], [[1] * 40])
        raise ValueError("on purpose")

    expected = [write(model, index) for index in (0, 2)]
    results = in_threads(4, work)
    assert [results[0], results[2]] == expected
    assert [str(results[index]) for index in (1, 3)] == ["on purpose"] * 2


def test_one_cache_in_two_threads_is_an_error_or_right(model):
    """Never another text: the second caller is refused, or came when the first one had left."""
    cache = model.create_cache(32, 2048)
    expected = [write(model, index) for index in range(2)]
    for _ in range(5):
        results = in_threads(2, lambda index: write(model, index, cache=cache))
        for result, text in zip(results, expected, strict=True):
            assert result == text or isinstance(result, Exception), result
        for seq_id in cache.sequence_ids():
            cache.remove_sequence(seq_id)
        cache.check_integrity()
    assert write(model, 0, cache=cache) == expected[0]


def test_a_model_is_loaded_in_several_threads_at_once():
    texts = in_threads(4, lambda index: write(DecoderModel.from_pretrained(), 0))
    assert texts == [texts[0]] * 4 and isinstance(texts[0], list)


def test_a_parallel_model_serves_several_threads():
    with ParallelModel.from_pretrained(num_shards=2, threads=True) as model:
        expected = [write(model, index) for index in range(3)]
        assert in_threads(3, lambda index: write(model, index)) == expected


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
