# SPDX-License-Identifier: Apache-2.0
"""Token ids and logits that are wrong: an error of the right kind, and a cache as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tvm_pagedkv_lm import DecoderModel, ParallelModel, SamplingParams, generate
from tvm_pagedkv_lm.engine.parameters import Window, sample
from tvm_pagedkv_lm.model.source import TINY, open_model
from tvm_pagedkv_lm.text.tokens import check_batch, check_tokens

from ...support.harness.in_child import failures

VOCAB = 258
OUTSIDE = (-1, -(2**31), -(2**63), -(2**80), VOCAB, 2**20, 2**31 - 1, 2**31, 2**32, 2**63, 2**80)
NO_INTEGERS = (1.0, float("nan"), True, "1", None, [])


def wrong(call, name: str, first: list[int], tokens, error: type, message: str):
    """A call with wrong tokens after a right one, in a child, for it may crash."""

    def check() -> None:
        cache = call.__self__.create_cache(2, 64, 16)
        cache.add_sequence(0)
        call.__self__.prefill(cache, [0], [first])
        with pytest.raises(error, match=message):
            call(cache, [0], tokens)
        # The cache is as it was, and goes on.
        assert call.__self__.prefill(cache, [0], [first]).shape == (1, VOCAB)
        if isinstance(call.__self__, DecoderModel):
            assert cache.sequence_length(0) == 2 * len(first)
            cache.check_integrity()

    return f"{name} {tokens!r}", check


def cases(model):
    assert model.config.vocab_size == VOCAB
    for token in OUTSIDE:
        message = rf"token id {token} at index {{}} of {{}} is not in \[0, {VOCAB}\)"
        for name in ("prefill", "logits"):
            call, text = getattr(model, name), message.format(1, r"tokens\[0\]")
            yield wrong(call, name, [1, 2], [[3, token]], ValueError, text)
        text = message.format(0, "tokens")
        yield wrong(model.decode, "decode", [1, 2], [token], ValueError, text)
    for token in NO_INTEGERS:
        yield wrong(model.prefill, "prefill", [1], [[token]], (TypeError, ValueError), "tokens")
        yield wrong(model.decode, "decode", [1], [token], (TypeError, ValueError), "tokens")
    yield wrong(model.decode, "decode", [1], [1, 2], ValueError, "")
    yield wrong(model.decode, "decode", [1], [], ValueError, "")
    yield wrong(model.prefill, "prefill", [1], [], ValueError, "at least one sequence")
    yield wrong(model.prefill, "prefill", [1], [[1], [2]], ValueError, "")


def test_wrong_tokens():
    assert failures(cases(DecoderModel.from_pretrained())) == []


def test_wrong_tokens_for_workers():
    model = ParallelModel.from_pretrained(num_shards=2, threads=True)
    try:
        cache = model.create_cache(2, 64, 16)
        cache.add_sequence(0)
        expected = model.prefill(cache, [0], [[1, 2]])
        for token in OUTSIDE:
            for call, tokens in (
                (model.prefill, [[3, token]]), (model.logits, [[token]]), (model.decode, [token]),
            ):  # fmt: skip
                with pytest.raises(ValueError, match=f"token id {token} at index .* not in"):
                    call(cache, [0], tokens)
        cache.pop_n(0, 2)
        np.testing.assert_array_equal(model.prefill(cache, [0], [[1, 2]]), expected)
    finally:
        model.close()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_arrays_of_tokens(dtype):
    ids = check_tokens("tokens", np.array([1, 0, 99], dtype), VOCAB)
    assert ids.dtype == "int32" and ids.tolist() == [1, 0, 99]
    assert check_batch([ids, [5], np.array([], dtype)], VOCAB).tolist() == [1, 0, 99, 5]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, VOCAB], ValueError, rf"token id {VOCAB} at index 1 of prompt 2 is not in"),
        ([-1], ValueError, "token id -1 at index 0 of prompt 2"),
        ([1.5], TypeError, "prompt 2 must be integers, got 1.5"),
        ([[1]], TypeError, r"prompt 2 must be integers, got \[1\]"),
        (np.ones((1, 2), "int32"), ValueError, r"prompt 2 must have shape \[n\], got \[1, 2\]"),
        (np.ones(2), TypeError, "prompt 2 must be integers, got float64"),
        (np.ones(2, bool), TypeError, "prompt 2 must be integers, got bool"),
    ],
)
def test_wrong_prompts(prompt, error, message):
    with pytest.raises(error, match=message):
        generate(DecoderModel.from_pretrained(), ["a", prompt])


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_wrong_logits(temperature, top_p):
    params = SamplingParams(temperature=temperature, top_p=top_p)
    random = np.random.default_rng(0)
    nan, inf = np.float32("nan"), np.float32("inf")
    for values in ([1, nan, 2], [nan] * 3, [1, inf, 2], [-inf] * 3, [nan, inf, 0]):
        with pytest.raises(ValueError, match="logits must be finite.* of 3 is"):
            sample(np.array(values, "float32"), params, random)
    for shape in ((0,), (1, 3)):
        with pytest.raises(ValueError, match="logits must have shape"):
            sample(np.zeros(shape, "float32"), params, random)
    assert sample(np.array([-inf, 1, -inf], "float32"), params, random) == 1


def test_a_model_that_computes_nan():
    model = DecoderModel.from_pretrained()
    original = model.prefill
    model.prefill = lambda *arguments: original(*arguments) * np.float32("nan")
    with pytest.raises(ValueError, match=r"logits must be finite.* is nan$"):
        list(generate(model, ["a"]))
    model.options = replace(model.options, dtype="float16")
    with pytest.raises(ValueError, match="logits must be finite.*run it in bfloat16"):
        list(generate(model, ["a"]))


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_extreme_temperatures(temperature):
    params = SamplingParams(temperature=temperature, top_p=1.0)
    logits, random = np.array([0, 3, 1], "float32"), np.random.default_rng(0)
    drawn = {sample(logits, params, random) for _ in range(100)}
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize("field", ["n", "max_tokens", "seed"])
@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_parameters_that_are_no_integers(field, value):
    with pytest.raises(TypeError, match=f"{field} must be an integer, got"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_windows_that_are_no_integers(value):
    for fields in ({"size": value}, {"size": 8, "sinks": value}):
        with pytest.raises(TypeError, match="must be an integer, got"):
            Window(**fields)


def test_tokenizers_that_cut_and_pad(tmp_path):
    """Files keep how the texts of a training were cut and padded; prompts are neither."""
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    fields = json.loads((folder / "tokenizer.json").read_text())
    more = {"stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    fields["truncation"] = {"max_length": 8, **more}
    pad = {"direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    fields["padding"] = {"strategy": {"Fixed": 64}, "pad_token": "x", **pad}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    text = "def f(x):\n    return x + 1\n"
    found, expected = (open_model(each).tokenizer().encode(text).ids for each in (folder, TINY))
    assert found == expected and len(found) > 8
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        open_model(folder).tokenizer()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
