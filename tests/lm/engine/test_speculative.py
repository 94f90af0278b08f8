# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup, and generation that verifies them: the same text in fewer steps."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, Statistics, generate
from tvm_pagedkv_lm.cli.command import main
from tvm_pagedkv_lm.engine.speculative import LONGEST_MATCH, Draft, HitRates, PromptLookup

from ...support.harness.selections import with_slow

NAMES = ("add", "sub", "mul", "matmul")
LIST = "".join(f"object.__{name}__(self, other)\n" for name in NAMES) + "object."
PROMPTS = ["The with statement", "a_stmt ::= ", LIST, "x", "* A list is\n* A tuple is\n*"]
# Between the two likeliest tokens: a smaller gap may be lost where kernels round differently.
MARGINS = {"float32": 5e-5, "float16": 0.02, "bfloat16": 0.2}


@functools.cache
def load(dtype: str) -> DecoderModel:
    return DecoderModel.from_pretrained(None, dtype)


def run(model, prompts, params, **options):
    """Tokens by (prompt, continuation), and the statistics."""
    events = list(generate(model, prompts, params, **options))
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert isinstance(events[-1], Statistics)
    return {
        (f.prompt, f.continuation): (f.tokens, f.text, f.finish_reason) for f in finished
    }, events[-1]


def greedy(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=num_tokens)


def margin_of(model: DecoderModel, prompt: str, tokens) -> np.ndarray:
    """Return the margin of each greedy token over the next best, in plain decoding."""
    cache = model.create_cache(1, 512, 512)
    cache.add_sequence(0)
    rows = [model.prefill(cache, [0], [model.tokenizer.encode(prompt).ids])[0]]
    rows += [model.decode(cache, [0], [token])[0] for token in tokens[:-1]]
    top = np.sort(rows, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


# --- drafts -------------------------------------------------------------------------------------


def sure() -> HitRates:
    """Rates that let every match count."""
    rates = HitRates()
    for length in range(LONGEST_MATCH + 1):
        for _ in range(98):
            rates.record(length, True)
    return rates


def paths(draft: Draft) -> list[list[int]]:
    """Tokens from the root, without it, to every node."""
    found: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
        found.append([*found[parent], token])
    return found


def test_draft_is_what_followed():
    draft = PromptLookup([7, 1, 2, 3, 4, 5, 9, 9, 1, 2], sure()).draft(3, 8)
    assert draft.tokens == [2, 3, 4, 5] and draft.parents == [-1, 0, 1, 2]
    assert PromptLookup([1, 2, 3, 4], sure()).draft(8, 8).tokens == [4]
    assert PromptLookup([1], sure()).draft(8, 8).tokens == [1]


def test_draft_goes_on_with_a_period():
    draft = PromptLookup([1, 2, 3, 1, 2, 3, 1, 2], sure()).draft(7, 7)
    assert draft.tokens == [2, 3, 1, 2, 3, 1, 2, 3]


def test_draft_is_no_deeper_than_allowed():
    lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2], HitRates())
    assert max(map(len, paths(lookup.draft(8, 1)))) == 1
    assert lookup.draft(8, 0).tokens == [2]


def test_continuations_share_their_beginning():
    rates = HitRates()
    for length in range(LONGEST_MATCH + 1):
        for is_hit in (True, False):
            rates.record(length, is_hit)
    for _ in range(40):  # what agrees in three tokens or more is right as a rule
        for length in range(3, LONGEST_MATCH + 1):
            rates.record(length, True)
    # The longer match comes first, and both go on with 4.
    text = [5, 2, 3, 4, 6, 1, 2, 3, 4, 7, 8, 9, 1, 2, 3]
    draft = PromptLookup(text, rates).draft(8, 3)
    assert paths(draft)[:3] == [[], [4], [4, 7]]
    other = PromptLookup([2, 3, 4, 6, 0, 2, 3, 5, 8, 2, 3, 7, 1, 2, 3], HitRates()).draft(8, 2)
    # A guess has one chance in two, the next one half of the rest; a third one too little.
    assert paths(other) == [[], [7], [7, 1], [5]]


def test_drafts_that_may_not_branch():
    text = [2, 3, 4, 6, 0, 2, 3, 5, 8, 2, 3, 7, 1, 2, 3]
    draft = PromptLookup(text, HitRates()).draft(8, 2, branches=False)
    assert paths(draft) == [[], [7], [7, 1]]


def test_matches_are_ranked():
    text = [1, 2, 3, 8, 0, 2, 3, 7, 6, 2, 3, 5, 1, 2, 3]
    assert PromptLookup(text, HitRates()).matches() == [(3, 3), (2, 11), (2, 7)]


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_trees_of_what_the_text_holds(seed):
    rng = np.random.default_rng(seed)
    rates, text = HitRates(), [int(t) for t in rng.integers(0, 3, 5)]
    lookup, num_nodes = PromptLookup(text, rates), 0
    for _ in range(400):
        max_nodes, max_depth = (int(n) for n in rng.integers(0, 12, 2))
        draft = lookup.draft(max_nodes, max_depth)
        assert len(draft.tokens) <= max_nodes + 1 and draft.tokens[0] == text[-1]
        assert draft.parents[0] == -1
        assert all(0 <= p < node for node, p in enumerate(draft.parents) if node)
        found = paths(draft)
        num_nodes += len(found) - 1
        assert len(set(map(tuple, found))) == len(found)  # no node is there twice
        assert max(map(len, found)) <= max_depth
        for node, path in enumerate(found[1:], start=1):
            assert draft.child(draft.parents[node], path[-1]) == node
        token = int(rng.integers(0, 3)) if rng.random() < 0.3 else text[-4]
        lookup.record(draft, 0, token)
        lookup.append(token)
        text.append(token)
    assert lookup.tokens == text
    assert 0 < rates[2] < 1 and num_nodes > 400


def test_rates_learn_what_is_not_drafted():
    lookup = PromptLookup([1, 2, 3, 1, 2], HitRates())
    for _ in range(20):
        draft = lookup.draft(4, 4)
        lookup.record(draft, 0, 9)
    assert len(draft.tokens) == 1 and draft.guesses[0] == (3, 2)
    for _ in range(40):
        lookup.record(lookup.draft(4, 4), 0, 3)
    assert lookup.draft(4, 1).tokens == [2, 3]


# --- verification -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-4), pytest.param("bfloat16", 0.25, marks=pytest.mark.slow)]
)
def test_logits_of_a_tree_are_those_of_its_paths(dtype, tolerance):
    """Rows of a token tree agree with plain steps of forks, in a compiled model."""
    model = load(dtype)
    cache = model.create_cache(12, 1024, 128)
    texts = [list(b"The with statement is"), list(b"x = [1, 2")]
    trees = [list(b" usetod"), list(b", 3]")]
    parents = [[-1, 0, 1, 2, 0, 4, 0], [-1, 0, 0, 2]]
    for seq_id, text in enumerate(texts):
        cache.add_sequence(seq_id)
        model.prefill(cache, [seq_id], [text])
    expected = []
    for seq_id, (tree, above) in enumerate(zip(trees, parents, strict=True)):
        rows = []
        for node in range(len(tree)):
            path, at = [], node
            while at >= 0:
                path.insert(0, tree[at])
                at = above[at]
            cache.fork_sequence(seq_id, 9)
            rows.append(model.logits(cache, [9], [path])[0][-1])
            cache.remove_sequence(9)
        expected.append(np.stack(rows))
    actual = model.logits(cache, [0, 1], trees, parents)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance)
    cache.commit_tree([0, 1], [5, 1])  # and the text goes on from there
    kept = [texts[0] + list(b" to"), texts[1] + list(b", ")]
    for seq_id, text in enumerate(kept):
        cache.add_sequence(5 + seq_id)
        model.prefill(cache, [5 + seq_id], [text])
    after = model.decode(cache, [0, 1, 5, 6], [*b"nono"])
    np.testing.assert_allclose(after[:2], after[2:], atol=tolerance)
    cache.check_integrity()


@pytest.mark.parametrize("dtype", with_slow(MARGINS, "float16", "bfloat16"))
def test_greedy_text_is_the_same(dtype):
    """Up to the first token, if any, that plain decoding chose by less than the margin."""
    model, num_tokens = load(dtype), 120
    plain, _ = run(model, PROMPTS, greedy(num_tokens))
    drafted, statistics = run(model, PROMPTS, greedy(num_tokens), num_speculative_tokens=8)
    assert statistics.accepted_tokens > 20
    num_sure = 0
    for key, (tokens, _, _) in plain.items():
        close = np.flatnonzero(margin_of(model, PROMPTS[key[0]], tokens) < MARGINS[dtype])
        end = int(close[0]) if len(close) else num_tokens
        assert drafted[key][0][:end] == tokens[:end]
        num_sure += end
        if end == num_tokens:
            assert drafted[key] == plain[key]
    assert num_sure > {"float32": 599, "float16": 400, "bfloat16": 120}[dtype]


@pytest.mark.parametrize("num_drafts", with_slow([1, 2, 5, 16], 2, 16))
def test_number_of_drafts_does_not_matter(num_drafts):
    model = load("float32")
    plain, _ = run(model, PROMPTS, greedy(100))
    drafted, statistics = run(model, PROMPTS, greedy(100), num_speculative_tokens=num_drafts)
    assert drafted == plain
    assert 0 < statistics.accepted_tokens <= statistics.drafted_tokens


def test_sampled_text_is_the_same():
    """Drafts only say which logits are computed early: the draws are those of plain sampling."""
    model = load("float32")
    params = SamplingParams(n=2, temperature=0.6, max_tokens=80, seed=4)
    plain, _ = run(model, PROMPTS, params)
    drafted, statistics = run(model, PROMPTS, params, num_speculative_tokens=6)
    assert drafted == plain
    assert statistics.accepted_tokens > 0


def test_both_chains_and_trees_are_verified(monkeypatch):
    model, shapes = load("float32"), set()
    logits = type(model).logits

    def watched(self, cache, seq_ids, tokens, parents):
        for tree in parents:
            shapes.add(all(p == node - 1 for node, p in enumerate(tree)) and "chain" or "tree")
        return logits(self, cache, seq_ids, tokens, parents)

    monkeypatch.setattr(type(model), "logits", watched)
    plain, _ = run(model, PROMPTS, greedy(100))
    assert run(model, PROMPTS, greedy(100), num_speculative_tokens=8)[0] == plain
    assert shapes == {"chain", "tree"}


def test_repetitive_text_takes_fewer_steps(monkeypatch):
    model = load("float32")
    steps = {"logits": 0, "decode": 0}
    for name in steps:
        call = getattr(model, name)

        def counted(*args, name=name, call=call):
            steps[name] += 1
            return call(*args)

        monkeypatch.setattr(model, name, counted)
    _, statistics = run(model, [LIST], greedy(200), num_speculative_tokens=8)
    assert steps["logits"] + steps["decode"] < 120
    assert steps["logits"] + steps["decode"] == 199 - statistics.accepted_tokens


def test_capacity_chunks_and_forks_do_not_matter():
    model = load("float32")
    plain, _ = run(model, PROMPTS, greedy(60, n=2))
    drafted, statistics = run(
        model,
        PROMPTS,
        greedy(60, n=2),
        num_speculative_tokens=8,
        max_total_tokens=320,
        prefill_chunk_size=7,
    )
    assert drafted == plain
    assert statistics.pages_used <= statistics.pages_total == 20
    one = run(model, PROMPTS, greedy(60), num_speculative_tokens=8, max_num_sequences=1)[0]
    assert one == {key: plain[key] for key in plain if key[1] == 0}


def test_ends_at_the_limit_of_tokens_and_of_the_context():
    model = load("float32")
    prompt = (LIST * 5)[: 512 - 20]
    for length in (1, 2, 3, 19, 100):
        plain, _ = run(model, [prompt], greedy(length))
        assert run(model, [prompt], greedy(length), num_speculative_tokens=8)[0] == plain


def test_ends_at_eos_within_a_draft(monkeypatch):
    from dataclasses import replace

    model = load("float32")
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(ord("("),)))
    plain, _ = run(model, PROMPTS, greedy(120))
    assert any(reason == "stop" for _, _, reason in plain.values())
    assert run(model, PROMPTS, greedy(120), num_speculative_tokens=8)[0] == plain


def test_mistakes(capfd):
    with pytest.raises(ValueError, match="num_speculative_tokens must be 0 or more, got -1"):
        generate(load("float32"), ["x"], num_speculative_tokens=-1)
    for option in (["--sliding-window", "64"], ["--shards", "2"], ["--stages", "2"]):
        assert main(["generate", "x", "--speculative", *option]) == 2
        assert "--speculative cannot be combined with --s" in capfd.readouterr().err
    for value in ("0", "x", "-1"):
        with pytest.raises(SystemExit):
            main(["generate", "x", f"--speculative={value}"])
        assert "the number of tokens to draft must be at least 1" in capfd.readouterr().err


def test_command(capfd):
    arguments = ["generate", LIST, "--temperature", "0", "--max-tokens", "100"]
    assert main(arguments) == 0
    plain = capfd.readouterr()
    assert "drafted" not in plain.err
    assert main([*arguments, "--speculative"]) == 0
    drafted = capfd.readouterr()
    assert drafted.out == plain.out
    summary = r"accepted \d+ of \d+ drafted tokens \(\d+%\), \d\.\d\d tokens a step"
    assert re.search(rf"decode 99 tokens, \d+ tokens/s; {summary}; pages", drafted.err)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
