# SPDX-License-Identifier: Apache-2.0
"""Stop strings, and the sampling parameters that a model brings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, TextEvent, generate
from tvm_pagedkv_lm.engine.parameters import sample
from tvm_pagedkv_lm.engine.stop_strings import StopStrings
from tvm_pagedkv_lm.model.source import TINY


def first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, a character at a time."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)]
    return text


def test_stops_do_not_depend_on_the_pieces():
    print("seed 0")
    random = np.random.default_rng(0)
    num_stopped = 0
    for _ in range(2000):
        text = "".join(random.choice([*"abc"], 12))
        stops = ["".join(random.choice([*"abc"], random.integers(1, 5))) for _ in range(2)]
        state, out, is_stop, at = StopStrings(stops), "", False, 0
        while at < len(text) and not is_stop:
            size = int(random.integers(0, 4))
            piece, is_stop = state.push(text[at : at + size])
            out, at = out + piece, at + size
            assert first_stop(text, stops).startswith(out), "shown too early"
        out += "" if is_stop else state.rest()
        assert out == first_stop(text, stops), (text, stops)
        num_stopped += is_stop
    assert 200 < num_stopped < 1900


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


PARAMS = SamplingParams(temperature=0, max_tokens=60)


def run(model, params, **options):
    events = list(generate(model, ["The with statement"], params, **options))
    texts = [e for e in events if isinstance(e, TextEvent)]
    (finished,) = [e for e in events if isinstance(e, FinishedEvent)]
    assert "".join(e.text for e in texts) == finished.text
    assert tuple(e.token for e in texts) == finished.tokens
    return finished


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 4}], ids=["plain", "drafts"])
def test_text_ends_before_a_stop_string(model, options):
    plain = run(model, PARAMS)
    stop = plain.text[20:26]  # six tokens of this byte-level model
    found = run(model, replace(PARAMS, stop=("never", stop)), **options)
    assert found.text == plain.text[: plain.text.index(stop)]
    assert found.finish_reason == "stop"
    assert found.tokens == plain.tokens[: plain.text.index(stop) + len(stop)]


def test_beginning_of_a_stop_string_is_text_at_the_end(model):
    """At the limit, and where the text ends by itself."""
    plain = run(model, PARAMS)
    found = run(model, replace(PARAMS, stop=(plain.text[-3:] + "never",)))
    assert (found.text, found.finish_reason) == (plain.text, "length")
    ended = replace(model.config, eos_token_ids=(plain.tokens[30],))
    original, model.config = model.config, ended
    try:
        until = run(model, PARAMS)
        found = run(model, replace(PARAMS, stop=(until.text[-3:] + "\0",)))
    finally:
        model.config = original
    assert found == until and found.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["text", ("",), (3,)])
def test_invalid_stops(stop):
    with pytest.raises(ValueError, match="stop must be a tuple of non-empty strings"):
        SamplingParams(stop=stop)


# --- top_k and the repetition penalty -----------------------------------------------------------


def test_top_k_samples_from_the_most_likely_tokens():
    logits = np.float32([1.0, 3.0, 2.0, 2.5, -1.0])
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=2.0, top_p=1.0, top_k=3)
    found = [sample(logits, params, random) for _ in range(4000)]
    weights = np.exp(np.array([3.0, 2.0, 2.5]) / 2)
    shares = np.bincount(found, minlength=5) / len(found)
    np.testing.assert_allclose(shares[[1, 2, 3]], weights / weights.sum(), atol=0.03)
    assert set(found) == {1, 2, 3}
    assert sample(logits, replace(params, top_k=1), random) == 1
    for top_k in (0, 5, 9):
        assert {sample(logits, replace(params, top_k=top_k), random) for _ in range(2000)} > {0, 4}


def test_repetition_penalty():
    logits = np.float32([3.0, 2.0, -1.0, -1.2])
    greedy = SamplingParams(temperature=0, repetition_penalty=2.0)
    random = np.random.default_rng(0)
    assert sample(logits, greedy, random, [0, 0, 2]) == 1
    assert logits.tolist() == np.float32([3.0, 2.0, -1.0, -1.2]).tolist()
    assert sample(logits[2:], greedy, random, [0]) == 1
    assert sample(logits, replace(greedy, repetition_penalty=1.0), random, [0]) == 0


# --- defaults of the model ----------------------------------------------------------------------


def folder_with(tmp_path, **fields):
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_defaults_come_from_the_model(tmp_path):
    fields = {"do_sample": True, "temperature": 0.3, "top_k": 5, "repetition_penalty": 1.1}
    model = DecoderModel.from_pretrained(folder_with(tmp_path, **fields))
    params = SamplingParams.for_model(model, top_k=None, max_tokens=7)
    assert params == SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.1, max_tokens=7)
    assert SamplingParams.for_model(model, temperature=0.0).temperature == 0
    chosen = SamplingParams.for_model(model)
    events = [list(generate(model, ["A list is"], each)) for each in (None, chosen)]
    assert events[0][-2].text == events[1][-2].text


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
