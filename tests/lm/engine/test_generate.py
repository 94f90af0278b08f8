# SPDX-License-Identifier: Apache-2.0
"""Generation with the included model, through the Python API and through the command."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pydoc_data.topics import topics

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import (
    DecoderModel,
    FinishedEvent,
    SamplingParams,
    Statistics,
    TextEvent,
    generate,
)
from tvm_pagedkv_lm.cli.command import main
from tvm_pagedkv_lm.engine.parameters import sample

PROMPTS = ["The with statement", "A list is", "x", "The yield expression is used when defining"]
LONG_PROMPT = "The value of the expression is an object that is bound to the name in the "


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


def _run(model, prompts, params=None, **options):
    """Texts by (prompt, continuation), and the statistics."""
    events = list(generate(model, prompts, params or SamplingParams(max_tokens=40), **options))
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert isinstance(events[-1], Statistics)
    return {(f.prompt, f.continuation): f.text for f in finished}, events[-1]


def without_eos(model, monkeypatch) -> None:
    """Let texts go on to their limits."""
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=()))


def test_reads_like_the_documentation(model):
    texts, _ = _run(model, PROMPTS, SamplingParams(n=2, max_tokens=150))
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]+", " ".join(texts.values()).lower())
    assert len(words) > 100
    assert sum(word in known for word in words) / len(words) > 0.8


@pytest.mark.parametrize("seed", [0, 5])
def test_same_seed_same_text(model, seed):
    params = SamplingParams(n=2, max_tokens=40, seed=seed)
    first, _ = _run(model, PROMPTS, params)
    assert _run(model, PROMPTS, params)[0] == first
    assert _run(model, PROMPTS, replace(params, seed=seed + 1))[0] != first
    assert first[0, 0] != first[0, 1]


def test_batch_mates_chunks_and_capacity_do_not_matter(model):
    together, _ = _run(model, PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        assert _run(model, [prompt])[0][0, 0] == together[index, 0]
    assert _run(model, PROMPTS, prefill_chunk_size=7)[0] == together
    assert _run(model, PROMPTS, max_num_sequences=1)[0] == together
    # Room for any one of them, not for all: the others wait.
    few, statistics = _run(model, PROMPTS, max_total_tokens=96)
    assert few == together
    assert statistics.pages_used <= statistics.pages_total == 6


def test_greedy_follows_the_logits(model):
    text = _run(model, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=20))[0][0, 0]
    cache = model.create_cache(1, 128, 64)
    cache.add_sequence(0)
    logits = model.prefill(cache, [0], [model.tokenizer.encode(PROMPTS[0]).ids])
    tokens = []
    for _ in range(20):
        tokens.append(int(logits[0].argmax()))
        logits = model.decode(cache, [0], tokens[-1:])
    assert model.tokenizer.decode(tokens) == text


def test_events_add_up(model):
    growing, reasons = {}, []
    (eos,) = model.config.eos_token_ids
    for event in generate(model, PROMPTS, SamplingParams(n=2, max_tokens=30)):
        if isinstance(event, TextEvent):
            key = event.prompt, event.continuation
            text, tokens = growing.get(key, ("", ()))
            growing[key] = text + event.text, (*tokens, event.token)
        elif isinstance(event, FinishedEvent):
            assert growing.pop((event.prompt, event.continuation)) == (event.text, event.tokens)
            is_whole = len(event.tokens) == 30
            assert event.finish_reason == ("length" if is_whole else "stop")
            assert len(event.tokens) <= 30 and eos not in event.tokens
            reasons.append(event.finish_reason)
    assert not growing
    assert len(reasons) == 2 * len(PROMPTS) and "length" in reasons


def test_forks_share_the_prompts_pages(model, monkeypatch):
    without_eos(model, monkeypatch)
    n = 4
    params = SamplingParams(n=n, max_tokens=8)
    length = len(model.tokenizer.encode(LONG_PROMPT).ids)
    _, statistics = _run(model, [LONG_PROMPT], params)
    full_pages = length // statistics.page_size
    assert statistics.prefill_tokens == length
    assert statistics.pages_shared >= full_pages > 2
    assert statistics.pages_used < n * full_pages
    assert statistics.decode_tokens == n * 7


def test_stops_at_eos(model, monkeypatch):
    newline = 10
    plain, _ = _run(model, PROMPTS, SamplingParams(max_tokens=120))
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(newline,)))
    stopped, _ = _run(model, PROMPTS, SamplingParams(max_tokens=120))
    assert stopped == {key: text.split("\n")[0] for key, text in plain.items()}


def test_stops_at_the_context(model, monkeypatch):
    without_eos(model, monkeypatch)
    prompt = "a" * 500
    params = SamplingParams(max_tokens=10_000, temperature=2.0, top_p=1.0)
    (event, _) = [e for e in generate(model, [prompt], params) if not isinstance(e, TextEvent)]
    assert event.finish_reason == "length"
    assert len(event.tokens) == model.config.context_length - 501


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 0.8), (1.5, 0.3)])
def test_sampling_distribution(seed, temperature, top_p):
    random = np.random.default_rng(seed)
    logits = random.normal(size=12).astype("float32") * 2
    weights = np.exp(logits.astype("float64") / temperature)
    weights /= weights.sum()
    order = np.argsort(-weights)
    nucleus = order[: 1 + int(np.sum(np.cumsum(weights[order]) < top_p))]
    expected = np.zeros(12)
    expected[nucleus] = weights[nucleus] / weights[nucleus].sum()
    params = SamplingParams(temperature=temperature, top_p=top_p)
    count = 20_000
    drawn = [sample(logits, params, random) for _ in range(count)]
    found = np.bincount(drawn, minlength=12) / count
    assert not found[expected == 0].any()
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / count))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([""], {}, "prompt 1 is empty"),
        (["a", []], {}, "prompt 2 is empty"),
        ([[258]], {}, "token id 258 at index 0 of prompt 1"),
        (["a" * 512], {}, "context holds 512"),
        (["a" * 100], {"max_total_tokens": 96}, "the cache is too small"),
        (["a"], {"max_total_tokens": 0}, "max_total_tokens must be at least 1"),
        (["a"], {"prefill_chunk_size": 0}, "prefill_chunk_size must be at least 1"),
    ],
)
def test_mistakes(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, SamplingParams(max_tokens=4), **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_p", -0.1),
     ("top_p", 1.5), ("max_tokens", 0), ("seed", -1)],
)  # fmt: skip
def test_sampling_mistakes(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


# --- the command --------------------------------------------------------------------------------


def test_command_streams_one_text(capfd):
    assert main(["generate", PROMPTS[0], "--max-tokens", "40", "--seed", "3"]) == 0
    out, error = capfd.readouterr()
    assert out.startswith(PROMPTS[0])
    assert len(out) > len(PROMPTS[0]) + 10
    assert re.search(
        r"prefill \d+ tokens, \d+ tokens/s; decode \d+ tokens, \d+ tokens/s; pages \d+ of \d+",
        error,
    )


def test_command_measures_the_machine_when_asked(capfd):
    assert main(["generate", PROMPTS[0], "--max-tokens", "8", "--measure"]) == 0
    rates = (
        r"prefill \d+ tokens, \d+ tokens/s \(\d+% of the multiplication peak\); "
        r"decode \d+ tokens, \d+ tokens/s \(\d+% of the read bandwidth\); pages \d+ of \d+"
    )
    assert re.search(rates, capfd.readouterr().err)


def test_command_prints_a_traceback_when_asked(capfd):
    assert main(["generate", "x", "--top-p", "2", "--traceback"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert error.splitlines()[-1].startswith("tvm-pagedkv: error: top_p must be in")


def test_command_shows_several_texts(capfd, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("A “tuple”", encoding="utf-8")
    arguments = ["--prompt", PROMPTS[1], "--file", str(file), "-n", "2", "--max-tokens", "20"]
    assert main(["generate", *arguments]) == 0
    out = capfd.readouterr().out
    headers = re.findall(r"^--- prompt (\d), continuation (\d) of 2 ---$", out, re.MULTILINE)
    assert sorted(headers) == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert out.count(PROMPTS[1]) == 2 and out.count("A “tuple”") == 2


def test_command_draws_its_pages(capfd, tmp_path):
    file = tmp_path / "pages.svg"
    arguments = [PROMPTS[3], "-n", "3", "--max-tokens", "8", "--draw-pages", str(file)]
    assert main(["generate", *arguments]) == 0
    used, total, shared = re.search(
        r"pages (\d+) of (\d+) used, (\d+) shared", capfd.readouterr().err
    ).groups()
    picture = file.read_text(encoding="utf-8")
    assert f">{used} of {total} pages in use<" in picture
    assert "3 sequences with" in picture and f" {shared} pages are shared" in picture


def test_command_info(capfd):
    assert main(["info"]) == 0
    out = capfd.readouterr().out
    for name in ("tvm-pagedkv", "apache-tvm", "library", "target", "threads", "compiled files"):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE), name


def test_command_info_while_builds_end(capfd, tmp_path, monkeypatch):
    """Folders and files may be gone when they are looked at."""
    scratch, lock = tmp_path / ".build-a", tmp_path / ".build-a.lock"
    (tmp_path / "b.so").touch()
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path))
    scan = os.scandir

    class Scan:
        """The entries of a folder, where a build ends once they are listed."""

        def __init__(self, path):
            building = os.fspath(path) == str(tmp_path)
            if building:
                scratch.mkdir()
                lock.touch()
            with scan(path) as entries:
                self.entries = iter(list(entries))
            if building:
                scratch.rmdir()
                lock.unlink()

        def __next__(self):
            return next(self.entries)

        def __iter__(self):
            return self

        __enter__ = __iter__

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Scan)
    assert main(["info"]) == 0
    assert f"{tmp_path} (1 files, 0.0 MiB)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        ([""], "prompt 1 is empty"),
        (["a", "caf\udce9"], "prompt 2 is not UTF-8 text"),  # as the shell's bytes arrive
        (["x", "--model", "no/such/folder"], "there is no file or folder no/such/folder"),
        (["x", "--temperature", "-1"], "temperature must be 0 or more"),
        (["x", "--top-p", "2"], "top_p must be in"),
        (["x", "--dtype", "int8"], "dtype must be one of"),
        (["x", "--weights", "int3"], "weights must be one of auto, float, int8, int4"),
        (["x", "--page-size", "12"], "page_size must be a power of two"),
        (["x", "--max-total-tokens", "16"], "the cache is too small"),
        (["x" * 600], "context holds 512"),
        (["--file", "no/such/file"], "cannot read prompt file no/such/file"),
        (["x", "--draw-pages", "no/such/pages.svg"], "cannot write page map no/such/pages.svg"),
        (["--file", "latin1.txt"], "latin1.txt is not UTF-8 text: byte 0xe9 at offset 3"),
    ],
)
def test_command_mistakes(capfd, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert main(["generate", "--model", "tiny", *arguments]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("tvm-pagedkv: error: ") and error.count("\n") == 1
    assert message in error


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
