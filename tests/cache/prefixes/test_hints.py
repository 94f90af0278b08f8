# SPDX-License-Identifier: Apache-2.0
"""Hints about texts that come again: `retain`, `pin`, `release`, `demote` and `prefetch`."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ...support.emulators.dict_store import DictStore
from .test_prefix_cache import Texts
from .test_prefix_tiers import SMALL, TieredTexts

PROMPT = list(range(30))  # seven full pages of four, of sixteen


def advance_clock(cache, seconds: float) -> None:
    tvm_ffi.get_global_func("pagedkv.prefix_advance_clock")(cache, seconds)


def once(texts: Texts, prompt: list[int]) -> int:
    """Run a prompt as a sequence that comes and goes; returns how much was reused."""
    reused = texts.run(7, prompt)
    texts.finish(7)
    return reused


def fill(texts: Texts) -> None:
    """Other texts take all pages that they can get without those of a priority."""
    for begin in range(40, 80, 10):
        once(texts, [100 + begin, *range(begin, begin + 34)])


def test_a_retained_text_is_still_there():
    texts = Texts(**SMALL)
    once(texts, PROMPT)
    fill(texts)
    assert once(texts, PROMPT) == 0
    hint = texts.cache.retain(np.asarray(PROMPT), priority=1)
    stats = texts.cache.stats()
    assert (stats["num_hints"], stats["num_retained_pages"], stats["num_used_pages"]) == (1, 7, 0)
    fill(texts)
    assert once(texts, PROMPT) == 28
    assert texts.cache.match_prefix(PROMPT, b"salt") == 0
    assert texts.cache.release(hint) and not texts.cache.release(hint)
    fill(texts)
    assert once(texts, PROMPT) == 0


def test_pinned_pages_count_as_used():
    texts = Texts(**SMALL)
    hint = texts.cache.pin(PROMPT)  # before there are any
    once(texts, PROMPT)
    stats = texts.cache.stats()
    assert (stats["num_hint_pinned_pages"], stats["num_used_pages"]) == (7, 7)
    assert stats["num_pinned_pages"] == 0  # by transfers
    for begin in (40, 60):
        once(texts, list(range(begin, begin + 36)))  # all other pages
    assert once(texts, PROMPT) == 28
    with pytest.raises(pkv.CacheFullError, match="hints pin 7 pages"):
        texts.run(0, list(range(100, 138)))
    texts.cache.remove_sequence(0)
    with pytest.raises(pkv.CacheFullError, match="the pin needs 2 pages .* may hold 8"):
        texts.cache.pin(list(range(200, 208)))
    assert texts.cache.stats()["num_hints"] == 1
    texts.cache.release(hint)
    assert texts.cache.stats()["num_used_pages"] == 0


def test_a_hint_ends_with_its_time():
    texts = Texts(**SMALL)
    once(texts, PROMPT)
    texts.cache.retain(PROMPT, ttl=60)
    texts.cache.pin(PROMPT[:8], ttl=3600)
    advance_clock(texts.cache, 59)
    assert texts.cache.stats()["num_hints"] == 2
    advance_clock(texts.cache, 1.5)
    assert texts.cache.stats()["num_hints"] == 1
    texts.start(0, PROMPT)
    texts.cache.begin_forward([0], [1])
    with pytest.raises(ValueError, match="prefix_advance_clock"):
        advance_clock(texts.cache, 3600)
    texts.cache.abort_forward()
    advance_clock(texts.cache, 3600)
    assert texts.cache.stats()["num_hint_pinned_pages"] == 0
    texts.cache.check_integrity()


@pytest.mark.parametrize("name", ["clear", "forget_prefixes"])
def test_all_hints_end_with_their_texts(name):
    texts = Texts(**SMALL)
    once(texts, PROMPT)
    hints = [texts.cache.retain(PROMPT), texts.cache.pin(PROMPT)]
    getattr(texts.cache, name)()
    texts.cache.check_integrity()
    stats = texts.cache.stats()
    assert stats["num_hints"] == stats["num_retained_pages"] == stats["num_used_pages"] == 0
    assert not any(texts.cache.release(hint) for hint in hints)


def test_a_demoted_text_goes_to_host_memory_and_comes_back():
    texts = TieredTexts()
    texts.once(PROMPT)
    texts.once([50, 51, 52, 53, 54])
    assert texts.cache.demote(PROMPT, tier="host") == 8  # with the last page, which is not full
    assert texts.tiers["num_saved_pages"] == 7
    assert texts.cache.locate_prefix(PROMPT) == [("pool",)] * 7
    texts.cache.clear()
    assert texts.cache.match_prefix([*PROMPT, 0]) == 28
    texts.cache.prefetch([*PROMPT, 0], tier="pool")
    assert texts.cache.locate_prefix(PROMPT) == [("pool",)] * 7
    assert texts.cache.sequence_ids() == []
    assert texts.cache.stats()["num_prefix_lookups"] == 2
    assert texts.once(PROMPT) == 28


def test_host_memory_keeps_what_is_retained():
    texts = TieredTexts(tiers={"host_bytes": 1 << 15})
    texts.once(PROMPT)
    texts.cache.retain(PROMPT)
    for begin in range(0, 200, 10):
        texts.once([200, begin, *range(begin, begin + 50)])
    assert texts.tiers["num_evicted_pages"] > 0
    assert texts.once(PROMPT) == 28
    assert texts.cache.stats()["num_retained_pages"] == 7


def test_a_demoted_text_leaves_host_memory_for_the_store():
    store = DictStore()
    texts = TieredTexts(tiers={"store": store, "model_id": "m", "host_bytes": 1 << 15})
    texts.once(PROMPT)
    texts.cache.demote(PROMPT, tier="store")
    assert texts.cache.flush_prefixes(60)
    assert len(store.values) >= 7
    texts.cache.check_integrity()


def test_wrong_arguments():
    cache = Texts(**SMALL).cache
    for options, message in (
        ({"priority": 0}, "priority must be between 1 and 100"),
        ({"priority": 101}, "priority must be between"),
        ({"ttl": 0}, "ttl must be more than 0"),
        ({"ttl": float("nan")}, "ttl must be more than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.retain(PROMPT, **options)
    for call in (cache.retain, cache.pin, cache.demote, cache.prefetch):
        with pytest.raises(ValueError, match="token ids must be in"):
            call([-1])
        with pytest.raises(TypeError, match="salt must be bytes"):
            call(PROMPT, salt="text")
    for tier, message in (("host", "no tier host"), ("store", "no tier store"), ("disk", "one of")):
        with pytest.raises(ValueError, match=message):
            cache.demote(PROMPT, tier=tier)
    with pytest.raises(ValueError, match="tier must be one of host, pool"):
        cache.prefetch(PROMPT, tier="store")
    with pytest.raises(KeyError, match="no hint 5"):
        cache.release(5)
    with pytest.raises(ValueError, match="host memory only"):
        TieredTexts().cache.demote(PROMPT, tier="store")
    assert cache.stats()["num_hints"] == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tiers", [None, {"host_bytes": 1 << 14}], ids=["pool", "host"])
def test_hints_change_no_result(tiers, seed):
    """Random texts, each compared with the reference in every row, under random hints."""
    rng = np.random.default_rng(seed)
    texts = Texts((0, 6), **SMALL) if tiers is None else TieredTexts((0, 6), tiers=tiers)
    texts.has_steady_matches = False
    prompts = [[int(t) for t in rng.integers(0, 2, 24)] for _ in range(4)]
    hints: list[int] = []
    for _ in range(40):
        prompt = prompts[int(rng.integers(4))][: int(rng.integers(1, 25))]
        match int(rng.integers(6)):
            case 0:
                ttl = float(rng.integers(1, 20)) if rng.random() < 0.5 else None
                hints.append(texts.cache.retain(prompt, ttl=ttl, priority=int(rng.integers(1, 9))))
            case 1:
                try:
                    hints.append(texts.cache.pin(prompt, ttl=float(rng.integers(1, 9))))
                except pkv.CacheFullError:
                    texts.cache.release(hints[0]) if hints else None
            case 2:
                texts.cache.demote(prompt)
                advance_clock(texts.cache, 2)
            case 3:
                texts.cache.prefetch(prompt, tier="pool")
            case _:
                once(texts, [*prompt, int(rng.integers(2))])
        texts.cache.check_integrity()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
