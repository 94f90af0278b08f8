# SPDX-License-Identifier: Apache-2.0
"""generation_config.json: what transformers takes is read, a warning says what is not applied."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel, SamplingParams  # noqa: E402
from tvm_pagedkv_lm.engine.parameters import sample  # noqa: E402

from ..text.test_stop_strings import folder_with  # noqa: E402


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),  # as vLLM says it
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": None, "temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.0, "temperature": 1}, {"top_p": 0.0, "temperature": 1.0}),
        ({"top_p": 1, "top_k": 20.0}, {"top_p": 1.0, "top_k": 20}),
        ({"eos_token_id": -1, "pad_token_id": -1, "bos_token_id": None}, {}),
        ({"max_length": 20, "use_cache": True, "cache_implementation": "hybrid"}, {}),
        (
            {
                "num_beams": 1,
                "min_p": 0.0,
                "typical_p": 1.0,
                "no_repeat_ngram_size": 0,
                "suppress_tokens": [],
                "bad_words_ids": None,
                "num_return_sequences": 1,
            },
            {},
        ),
    ],
)
def test_fields_of_generation_config(tmp_path, fields, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DecoderModel.from_pretrained(folder_with(tmp_path, **fields))
    assert model.sampling == expected
    assert model.config.eos_token_ids == (257,)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    for name in fields:  # transformers takes all of them
        assert getattr(theirs, name) == fields[name]


def test_fields_that_are_not_applied(tmp_path):
    fields = {"min_p": 0.05, "no_repeat_ngram_size": 3, "top_k": 4, "suppress_tokens": [3]}
    folder = folder_with(tmp_path, **fields)
    message = "generation_config.json: min_p, no_repeat_ngram_size, suppress_tokens not applied"
    with pytest.warns(UserWarning, match=message):
        assert DecoderModel.from_pretrained(folder).sampling == {"top_k": 4}
    (folder / "generation_config.json").write_text('{"min_p": 0.05, "do_sample": false}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the most likely token has no use for it
        DecoderModel.from_pretrained(folder)


@pytest.mark.parametrize("ids", [-1, [-1], [-100, 7], [], None])
def test_ends_that_no_token_has(ids, tmp_path):
    folder = folder_with(tmp_path, eos_token_id=ids)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
    expected = (7,) if ids == [-100, 7] else ()
    assert DecoderModel.from_pretrained(folder).config.eos_token_ids == expected


def test_top_p_of_zero_takes_the_most_likely_token():
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=2.0, top_p=0.0)
    for _ in range(20):
        logits = random.standard_normal(50).astype("float32")
        warper = transformers.TopPLogitsWarper(0.0)
        theirs = warper(None, torch.tensor(logits)[None])[0]
        assert sample(logits, params, random) == logits.argmax() == theirs.argmax()
        assert torch.isfinite(theirs).sum() == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"temperature": float("inf")}, {"top_p": 2},
        {"top_p": -0.1}, {"top_p": float("nan")}, {"top_k": -2}, {"top_k": 1.5}, {"top_k": True},
        {"top_k": 10**400}, {"repetition_penalty": 0},
    ],
    ids=lambda fields: str(fields)[:30],
)  # fmt: skip
def test_invalid_fields_are_named(tmp_path, fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"generation_config.json: {name} must be"):
        DecoderModel.from_pretrained(folder_with(tmp_path, **fields))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
