# SPDX-License-Identifier: Apache-2.0
"""Generation with sliding windows: the same text while it fits, and then without an end."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, Statistics, Window, generate
from tvm_pagedkv_lm.cli.command import main

PROMPTS = ["The with statement", "A list is", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained(sliding_window=True)


def _run(model, prompts, params, **options):
    """Texts by (prompt, continuation), and the statistics."""
    events = list(generate(model, prompts, params, **options))
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert isinstance(events[-1], Statistics)
    return {(f.prompt, f.continuation): f.text for f in finished}, events[-1]


def test_a_window_that_holds_the_text_changes_nothing(model):
    plain, _ = _run(DecoderModel.from_pretrained(), PROMPTS, GREEDY)
    for window in (None, Window(100, 4), Window(90)):
        assert _run(model, PROMPTS, GREEDY, window=window)[0] == plain
    assert _run(model, PROMPTS, GREEDY, window=Window(30, 4))[0] != plain


def test_chunks_batch_mates_and_capacity_do_not_matter(model):
    params, window = SamplingParams(max_tokens=50, n=2), Window(20, 3)
    prompts = [*PROMPTS, PROMPTS[0] * 4]  # the last one is longer than the window
    together, statistics = _run(model, prompts, params, window=window)
    for index, prompt in enumerate(prompts):
        alone, _ = _run(model, [prompt], params, window=window)
        assert [alone[0, i] for i in (0, 1)] == [together[index, i] for i in (0, 1)]
    assert _run(model, prompts, params, window=window, prefill_chunk_size=7)[0] == together
    assert _run(model, prompts, params, window=window, max_num_sequences=2)[0] == together
    few, statistics = _run(
        model, prompts, params, window=window, prefill_chunk_size=16, max_total_tokens=16 * 12
    )
    assert few == together
    assert statistics.pages_used <= statistics.pages_total == 12


def test_a_text_beyond_the_context_takes_a_few_pages(model):
    length = model.config.context_length + 100
    params = SamplingParams(max_tokens=length, seed=3)
    texts, statistics = _run(model, PROMPTS[:1], params, window=Window(64, 4))
    assert len(model.tokenizer.encode(texts[0, 0]).ids) > model.config.context_length - 100
    assert statistics.pages_used <= 7
    # A prompt that long, in chunks.
    prompt = [int(x) for x in model.tokenizer.encode(texts[0, 0]).ids]
    _, statistics = _run(
        model, [prompt], SamplingParams(max_tokens=5), window=Window(64, 4), prefill_chunk_size=32
    )
    assert statistics.prefill_tokens == len(prompt)
    assert statistics.pages_used <= 7 + 2


def test_mistakes(model):
    context = model.config.context_length
    for window, text in (
        (lambda: Window(0), "window must be between 1 and 2147483647, got 0"),
        (lambda: Window(8, 8), "fewer than the window .8., got 8"),
        (lambda: Window(8, -1), "got -1"),
    ):
        with pytest.raises(ValueError, match=text):
            window()
    with pytest.raises(ValueError, match=f"less than the model's context .{context}"):
        generate(model, ["x"], GREEDY, window=Window(context))
    with pytest.raises(ValueError, match="load the model with sliding_window=True"):
        generate(DecoderModel.from_pretrained(), ["x"], GREEDY, window=Window(8))
    with pytest.raises(ValueError, match="the cache is too small"):
        generate(model, ["x"], GREEDY, window=Window(30), max_total_tokens=64)


def test_command(capsys):
    arguments = ["generate", "x", "--temperature", "0", "--max-tokens", "120"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--sliding-window", "200", "--sinks", "3"]) == 0
    assert capsys.readouterr().out == plain
    assert main([*arguments, "--sliding-window", "16"]) == 0
    slid = capsys.readouterr()
    assert slid.out != plain
    assert main([*arguments, "--sinks", "3"]) == 2
    assert "--sinks needs --sliding-window" in capsys.readouterr().err
    assert main([*arguments, "--sliding-window", "3", "--sinks", "3"]) == 2
    assert "fewer than the window (3), got 3" in capsys.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
