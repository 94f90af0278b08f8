# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin alike: the same text as without reuse, and no page is computed twice."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv.config import PrefixCacheConfig
from tvm_pagedkv_lm import (
    DecoderModel,
    FinishedEvent,
    ParallelModel,
    SamplingParams,
    Statistics,
    TextEvent,
    Window,
    generate,
)
from tvm_pagedkv_lm.cli.command import main
from tvm_pagedkv_lm.cli.statistics import print_statistics

from ...support.emulators.dict_store import DictStore
from ...support.harness.selections import latin_square, with_slow

BASE = "The value of the expression is an object that is bound to the name in the local scope. "
PROMPTS = [
    f"{BASE}{BASE}The with statement",
    f"{BASE}{BASE}A list is",
    BASE + BASE,
    f"{BASE[:50]}default",
    "x",
    BASE + BASE,  # once more
    f"{BASE}A",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


def run(model, prompts, params=GREEDY, **options):
    """Tokens by (prompt, continuation), and the statistics."""
    events = list(generate(model, prompts, params, **options))
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert isinstance(events[-1], Statistics)
    return {(f.prompt, f.continuation): f.tokens for f in finished}, events[-1]


def num_distinct(prompts: list[list[int]], page_size: int) -> int:
    """Tokens to compute where each page of text is computed once, and the last token always is."""
    pages, rest = set(), 0
    for prompt in prompts:
        num_pages = (len(prompt) - 1) // page_size
        pages |= {tuple(prompt[: (i + 1) * page_size]) for i in range(num_pages)}
        rest += len(prompt) - num_pages * page_size
    return len(pages) * page_size + rest


def check(model, prompts, params=GREEDY, **options) -> Statistics:
    """Compare a run with one that computes every prompt from its beginning."""
    found, statistics = run(model, prompts, params, **options)
    options.pop("cache", None)
    expected, plain = run(model, prompts, params, prefix_cache=False, **options)
    assert found == expected
    assert plain.reused_tokens == 0 and plain.prefill_tokens == plain.prompt_tokens
    assert statistics.prompt_tokens == plain.prompt_tokens
    assert statistics.prefill_tokens + statistics.reused_tokens == statistics.prompt_tokens
    return statistics


@latin_square(2, "options", "n")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 50},
        {"max_num_sequences": 2},
        {"max_total_tokens": 18 * 16},  # for the longest prompt and a few pages
        {"max_total_tokens": 20 * 16, "prefill_chunk_size": 33},
        {"num_speculative_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 3])
def test_no_page_is_computed_twice(model, options, n):
    params = SamplingParams(n=n, temperature=0, max_tokens=24)
    if n > 1 and "max_total_tokens" in options:
        options = options | {"max_total_tokens": options["max_total_tokens"] + 8 * 16}
    encoded = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    statistics = check(model, PROMPTS, params, **options)
    assert statistics.prefill_tokens <= num_distinct(encoded, 16) < statistics.prompt_tokens / 2
    assert statistics.pages_used <= statistics.pages_total


def test_shared_pages_count_once(model):
    """A pool for one text runs several that share their beginning."""
    prompts = [f"{BASE}{BASE}- {letter}" for letter in "abcdef"]
    params = SamplingParams(temperature=0, max_tokens=8)
    pages = -(-(len(model.tokenizer.encode(prompts[0]).ids) + 7) // 16) + 5
    statistics = check(model, prompts, params, max_total_tokens=pages * 16)
    assert statistics.pages_used > pages - 5
    running, most = set(), 0
    for event in generate(model, prompts, params, max_total_tokens=pages * 16):
        if isinstance(event, TextEvent):
            running.add(event.prompt)
            most = max(most, len(running))
        elif isinstance(event, FinishedEvent):
            running.discard(event.prompt)
    assert most == 6


@pytest.mark.parametrize("seed", range(6), ids=lambda seed: f"seed{seed}")
def test_random_prompts_in_small_pools(model, seed):
    rng = np.random.default_rng(seed)
    words = BASE.split()

    def text(begin: list[str]) -> list[str]:
        return [*begin[: rng.integers(len(begin) + 1)], *rng.choice(words, rng.integers(1, 12))]

    texts: list[list[str]] = [[]]
    for _ in range(10):
        texts.append(text(texts[rng.integers(len(texts))]))
    prompts = [" ".join(each) for each in texts[1:]]
    n = int(rng.integers(1, 4))
    params = SamplingParams(n=n, temperature=0, max_tokens=int(rng.integers(1, 20)))
    length = max(len(model.tokenizer.encode(prompt).ids) for prompt in prompts)
    fullest = length // 16 + 1 + n * (params.max_tokens // 16 + 3)
    options = {
        "max_total_tokens": 16 * (fullest + int(rng.integers(6))),
        "prefill_chunk_size": int(rng.integers(1, 100)),
        "max_num_sequences": int(rng.integers(n, 12)),
        "num_speculative_tokens": int(rng.choice([0, 3])),
    }
    check(model, prompts, params, **options)


def test_a_cache_for_several_calls(model):
    cache = model.create_cache(8, 1024)
    encoded = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected, _ = run(model, PROMPTS, prefix_cache=False)
    for num_least in (0, sum(map(len, encoded)) - 16 * len(encoded)):
        found, statistics = run(model, PROMPTS, cache=cache, max_num_sequences=8)
        assert found == expected and statistics.reused_tokens >= num_least
        cache.check_integrity()
        assert len(cache) == 0
    assert statistics.prefill_tokens <= 16 * len(encoded)
    # A text and its continuation are the beginning of the next prompt.
    grown = [*encoded[0], *expected[0, 0], *encoded[1][-4:]]
    _, statistics = run(model, [grown], cache=cache, max_num_sequences=1)
    assert statistics.reused_tokens >= len(encoded[0]) + len(expected[0, 0]) - 1
    assert run(model, [grown])[0] == run(model, [grown], cache=cache, max_num_sequences=1)[0]


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("num_events", [1, 2, 9, 30])
def test_a_call_that_stops_early_leaves_the_cache_usable(model, num_events, num_drafts):
    cache = model.create_cache(8, 1024)
    cache.add_sequence(7)  # of the caller
    options = {"cache": cache, "max_num_sequences": 8, "num_speculative_tokens": num_drafts}
    events = generate(model, PROMPTS, GREEDY, **options)
    for _ in range(num_events):
        next(events)
    assert len(cache) > 1
    events.close()
    assert cache.sequence_ids() == [7]
    cache.check_integrity()
    assert check(model, PROMPTS, **options).reused_tokens > sum(map(len, PROMPTS)) / 2


@pytest.mark.parametrize(
    ("sizes", "drafts"), [((1, 1024), 0), ((3, 1024, 8), 0), ((4, 1024, 9), 3)]
)
def test_a_small_cache_is_no_reason_to_refuse(model, sizes, drafts):
    cache = model.create_cache(*sizes)
    texts, _ = run(model, PROMPTS, cache=cache, num_speculative_tokens=drafts)
    assert texts == run(model, PROMPTS)[0]


def test_more_continuations_than_the_cache_holds(model):
    params = SamplingParams(n=3, max_tokens=2)
    with pytest.raises(ValueError, match="max_num_sequences of at least 3 for these .*, got 2"):
        generate(model, PROMPTS, params, cache=model.create_cache(2, 1024))


def test_caches_that_do_not_suit(model):
    for sizes, options, message in (
        ((8, 1024), {"max_total_tokens": 512}, "max_total_tokens must be None with a cache"),
        ((8, 1024), {"max_num_sequences": 9}, "max_num_sequences of at least 9 .*, got 8"),
        (
            (32, 1024, 64),
            {"prefill_chunk_size": 65},
            "prefill_chunk_size of at least 65 .*, got 64",
        ),
        ((8, 1024, 4), {"num_speculative_tokens": 4}, "prefill_chunk_size of at least 5 .*, got 4"),
        ((32, 128), {}, "the cache is too small: prompt 1 .* the cache without its sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, cache=model.create_cache(*sizes), **options)
    other = DecoderModel.from_pretrained(page_size=32).create_cache(32, 1024)
    with pytest.raises(ValueError, match="page_size, 16, got 32"):
        generate(model, PROMPTS, cache=other)
    cache = model.create_cache(32, 256)
    cache.add_sequence(0)
    model.prefill(cache, [0], [[1] * 200])
    with pytest.raises(ValueError, match="the cache without its sequences gives 3"):
        generate(model, [BASE], cache=cache)


# --- other models -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantized_pages(kv_dtype):
    model = DecoderModel.from_pretrained(kv_dtype=kv_dtype)
    assert check(model, PROMPTS).reused_tokens > 400


def test_texts_with_a_window_reuse_nothing():
    model = DecoderModel.from_pretrained(sliding_window=True)
    assert check(model, PROMPTS, window=Window(64, 4)).reused_tokens == 0
    assert check(model, PROMPTS).reused_tokens > 400


SHARDS_AND_STAGES = {"num_shards": 2, "stages": [0, 1, 4], "threads": True}


@pytest.fixture(params=with_slow([{"stages": 2}, SHARDS_AND_STAGES], SHARDS_AND_STAGES), ids=str)
def workers(request):
    with ParallelModel.from_pretrained(**request.param) as model:
        yield model


def test_several_workers(model, workers):
    statistics = check(workers, PROMPTS)
    assert statistics.reused_tokens == run(model, PROMPTS)[1].reused_tokens > 400
    cache = workers.create_cache(4, 256)
    assert cache.add_sequence(0, range(50), b"salt") == 0
    workers.prefill(cache, [0], [range(50)])
    cache.record_tokens(0, range(50))
    cache.remove_sequence(0)
    assert cache.match_prefix(range(60), b"salt") == 50 and cache.match_prefix(range(60)) == 0
    assert cache.add_sequence(1, range(50), b"salt") == 49
    assert cache.match_prefix([]) == cache.add_sequence(2, []) == 0
    with pytest.raises(TypeError):
        cache.match_prefix([0.5])
    with pytest.raises(ValueError, match="token ids must be"):
        cache.add_sequence(3, [-1])
    assert cache.sequence_ids() == [1, 2]


# --- tiers --------------------------------------------------------------------------------------


def test_tiers_that_the_cache_counts(model, monkeypatch, capsys):
    """The line of the command names the tiers; those of a cache that has some."""
    counts = {"reused_pool_tokens": 100, "reused_host_tokens": 7, "num_host_pages": 3}

    def stats(self):
        counts["reused_host_tokens"] += 5
        return original(self) | {"prefix_tiers": dict(counts)}

    cache = model.create_cache(8, 1024)
    assert run(model, PROMPTS, cache=cache, max_num_sequences=8)[1].reused_by_tier == {}
    original = type(cache).stats
    monkeypatch.setattr(type(cache), "stats", stats)
    _, statistics = run(model, PROMPTS, cache=cache, max_num_sequences=8)
    assert statistics.reused_by_tier.keys() == {"pool", "host"}
    assert statistics.reused_by_tier["pool"] == 0 < statistics.reused_by_tier["host"]
    print_statistics(Statistics(9, 6, {"pool": 4, "host": 2, "store": 0}), None)
    error = capsys.readouterr().err
    assert "reused 6 of 9 prompt tokens (4 from pool, 2 from host); " in error


def test_texts_of_an_earlier_process_are_found_in_a_store(model):
    values: dict[bytes, bytes] = {}

    def config(name: str = "m") -> PrefixCacheConfig:
        store = DictStore(values)
        return PrefixCacheConfig(host_bytes=2**20, store=store, model_id=name, lookup_timeout=60.0)

    first = check_tiers(model, config())
    assert values and first.reused_by_tier["store"] == 0
    second = check_tiers(model, config())
    assert second.reused_by_tier["store"] > 200
    assert second.prefill_tokens < first.prefill_tokens / 4
    assert sum(second.reused_by_tier.values()) == second.reused_tokens
    assert check_tiers(model, config("other")).reused_by_tier["store"] == 0


def check_tiers(model, config: PrefixCacheConfig) -> Statistics:
    """Run all prompts with tiers; the text must not change, and the store must be closed."""
    found, statistics = run(model, PROMPTS, prefix_cache=config)
    assert found == run(model, PROMPTS, prefix_cache=False)[0]
    assert config.store.closed.is_set()
    return statistics


def test_tiers_that_do_not_go_together(model):
    config = PrefixCacheConfig(host_bytes=2**20)
    windowed = DecoderModel.from_pretrained(sliding_window=True)
    for other, options, message in (
        (model, {"cache": model.create_cache(32, 1024)}, "must not have tiers with a window"),
        (windowed, {"window": Window(64, 4)}, "must not have tiers with a window"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(other, PROMPTS, prefix_cache=config, **options)
    with (
        ParallelModel.from_pretrained(stages=2, threads=True) as workers,
        pytest.raises(ValueError, match="must not have tiers with several workers"),
    ):
        generate(workers, PROMPTS, prefix_cache=config)


# --- the command --------------------------------------------------------------------------------


def test_command_reuses_what_files_share(capfd, tmp_path):
    names = []
    for index, prompt in enumerate(PROMPTS[:3]):
        names.append(str(tmp_path / f"{index}.txt"))
        (tmp_path / f"{index}.txt").write_text(prompt, encoding="utf-8")
    arguments = ["--temperature", "0", "--max-tokens", "12", "--files", *names]
    assert main(["generate", *arguments]) == 0
    out, error = capfd.readouterr()
    computed, reused, whole = map(
        int,
        re.search(r"prefill (\d+) tokens.*; reused (\d+) of (\d+) prompt tokens; ", error).groups(),
    )
    assert computed + reused == whole and reused >= 320
    assert main(["generate", "--no-prefix-cache", *arguments]) == 0
    plain, error = capfd.readouterr()
    assert sorted(plain.split("---")) == sorted(out.split("---"))
    assert "reused" not in error and f"prefill {whole} tokens" in error


def test_command_finds_texts_of_earlier_runs(capfd, tmp_path):
    arguments = ["--temperature", "0", "--max-tokens", "12", PROMPTS[0]]
    assert main(["generate", *arguments]) == 0
    expected = capfd.readouterr().out
    for num_reused in (0, 192):
        folder = str(tmp_path / "pages")
        assert main(["generate", *arguments, "--prompt-cache", folder]) == 0
        out, error = capfd.readouterr()
        assert out == expected
        assert (f"reused {num_reused}" in error) == (num_reused > 0)
        assert ("from store)" in error) == (num_reused > 0)
    picture = tmp_path / "pages.svg"
    command = ["generate", *arguments, "--prompt-cache", folder, "--draw-pages", str(picture)]
    assert main([*command, "--prompt", f"{BASE[:50]}default"]) == 0
    capfd.readouterr()
    rows = re.findall(r'data-prefix="(.*?)" data-group="0">(.*?)</g>', picture.read_text(), re.S)
    assert [name for name, _ in rows] == ["prompt 1", "prompt 2"]
    # Sequences use all pages of the first prompt.
    assert 'href="#tierpool"' in rows[0][1] and 'href="#tier"' not in rows[0][1]
    for option in (["--no-prefix-cache"], ["--sliding-window", "64"], ["--stages", "2"]):
        assert main(["generate", *arguments, "--prompt-cache", "x", *option]) == 2
        assert "--prompt-cache cannot be combined with --" in capfd.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
