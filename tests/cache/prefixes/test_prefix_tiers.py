# SPDX-License-Identifier: Apache-2.0
"""Pages that the pool reclaims come back from host memory and from stores, as they were."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.cache import PrefixTierStats

from ...support.cases.caches.quantized_cache_cases import (
    CODEC_NAMES,
    LAYER,
    MLA_LAYER,
    SLIDING_LAYER,
    make_quantized,
)
from ...support.cases.kernels.kernel_specs import parametrize_seed
from ...support.emulators.dict_store import DictStore, FaultyStore
from ...support.emulators.python_kernels import poison
from ...support.harness.host_memory import flip_bit_of
from ...support.harness.selections import latin_square
from .test_prefix_cache import Texts

MB = 1 << 20
SMALL = {"page_size": 4, "max_total_tokens": 64, "max_num_sequences": 2}


class TieredTexts(Texts):
    """Texts over a cache with tiers."""

    has_steady_matches = False

    def __init__(self, windows=(0, 0), mode: str = "none", seed: int = 0, tiers=None, **fields):
        super().__init__(windows, mode, seed, **{**SMALL, **fields})
        tiers = {"host_bytes": MB, **(tiers or {})}
        pkv.open_prefix_cache(self.cache, pkv.PrefixCacheConfig(**tiers))

    @property
    def tiers(self) -> dict:
        return self.cache.stats()["prefix_tiers"]

    def once(self, prompt: list[int], salt: bytes = b"", check: bool = True) -> int:
        """Run a prompt as a sequence that comes and goes; returns how much was reused."""
        reused = self.run(7, prompt, salt)
        if check:
            self.check_kv(7)
        self.finish(7)
        return reused

    def fill(self, first: int) -> None:
        """Other texts take all pages."""
        for begin in range(first, first + 40, 10):
            self.once([100 + begin, *range(begin, begin + 39)])


@pytest.mark.parametrize("write", ["back", "through", "selective"])
def test_a_text_comes_back_from_host_memory(write):
    texts = TieredTexts(tiers={"write_policy": write})
    prompt = list(range(30))
    assert texts.once(prompt) == 0
    if write == "selective":
        assert texts.tiers["num_saved_pages"] == 0
        assert texts.once(prompt) == 29
    texts.fill(50)
    reused = texts.run(0, [*prompt, 1, 2, 3])
    assert reused == 28  # full pages
    texts.check_kv(0)
    stats = texts.tiers
    assert stats.keys() == PrefixTierStats.__annotations__.keys()
    assert stats["reused_host_tokens"] > 0 == stats["reused_store_tokens"]
    assert stats["num_host_pages"] > 0
    assert 0 < stats["host_bytes"] <= stats["host_capacity_bytes"] <= MB
    assert texts.run(1, [*prompt, 1, 2, 9]) == 30 + 2  # what came back is found in the pool
    texts.check_kv(1)


def counts_of(texts: TieredTexts) -> list[int]:
    stats = texts.cache.stats()
    names = ("num_prefix_lookups", "num_prefix_hits", "num_reused_tokens")
    return [*(stats[name] for name in names), texts.tiers["reused_host_tokens"]]


def test_damaged_host_memory_is_a_miss():
    texts = TieredTexts(tiers={"write_policy": "through"})
    prompt = list(range(30))
    texts.run(0, prompt)
    row = texts.cache.debug_get_kv(0, 13, 14)[0].numpy()[0, 0, 0].tobytes()  # on page 3 of 7
    texts.finish(0)
    texts.fill(50)
    before = counts_of(texts)
    flip_bit_of(texts.cache, row)
    assert texts.run(1, [*prompt, 1, 2, 3]) == 12
    texts.check_kv(1)
    after = counts_of(texts)
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 12, 12]
    assert texts.tiers["num_damaged_pages"] == texts.tiers["num_failed_loads"] == 1
    texts.finish(1)  # its pages are saved anew
    texts.fill(90)
    assert texts.once([*prompt, 1, 2, 3, 4]) == 32
    assert texts.tiers["num_damaged_pages"] == 1
    texts.cache.check_integrity()


@pytest.mark.parametrize("windows", [(0, 6), (6, 13), (0, -14)], ids=str)
def test_windows_need_their_pages_only(windows):
    texts = TieredTexts(windows, tiers={"write_policy": "through"}, max_total_tokens=96)
    prompt = list(range(40))
    texts.once(prompt, check=False)
    for begin in (50, 60, 70):
        texts.once([begin, *range(39)], check=False)
    before = texts.cache.stats()["num_reused_tokens"]
    assert texts.run(0, [*prompt, 1, 2]) == 40
    assert texts.tiers["reused_host_tokens"] > 0
    assert texts.cache.stats()["num_reused_tokens"] == before + 40
    texts.extend([0], [[4, 5, 6]])


def test_salts_never_meet():
    texts = TieredTexts(tiers={"write_policy": "through"})
    prompt = list(range(20))
    texts.once(prompt, b"one")
    texts.fill(50)
    assert texts.cache.match_prefix(prompt) == texts.cache.match_prefix(prompt, b"two") == 0
    assert texts.cache.match_prefix([*prompt, 1], b"one") == 20


def test_forgotten_texts_are_not_found():
    texts = TieredTexts(tiers={"write_policy": "through"})
    prompt = list(range(30))
    texts.run(0, prompt)
    texts.cache.forget_prefixes()
    texts.cache.check_integrity()
    assert texts.cache.match_prefix(prompt) == 0 == texts.tiers["num_host_pages"]
    assert texts.cache.num_recorded_tokens(0) == 0
    assert texts.cache.sequence_length(0) == 30


def test_errors_change_nothing():
    texts = Texts(**SMALL)
    config = pkv.PrefixCacheConfig(host_bytes=10)
    with pytest.raises(ValueError, match="host_bytes is 10, but a page of all layers takes"):
        pkv.open_prefix_cache(texts.cache, config)
    assert "prefix_tiers" not in texts.cache.stats()
    texts.start(0, [1, 2, 3])
    config = pkv.PrefixCacheConfig(host_bytes=MB)
    with pytest.raises(ValueError, match="the cache has texts"):
        pkv.open_prefix_cache(texts.cache, config)
    texts.finish(0)
    pkv.open_prefix_cache(texts.cache, config)
    with pytest.raises(ValueError, match="already"):
        pkv.open_prefix_cache(texts.cache, config)
    with pytest.raises(ValueError, match="lookup_timeout must be at least 0"):
        texts.cache.add_sequence(1, [1], lookup_timeout=-1)
    assert texts.cache.sequence_ids() == []
    texts.cache.check_integrity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs host_bytes, a disk_path or a store"),
        ({"host_bytes": -1}, "host_bytes must be between"),
        ({"disk_path": "x"}, "must name the model"),
        ({"store": DictStore()}, "must name the model"),
        ({"store": DictStore(), "disk_path": "x", "model_id": "m"}, "not both"),
        ({"store": 3, "model_id": "m"}, "int lacks exists"),
        ({"host_bytes": 1, "write_policy": "around"}, "must be one of through, back, selective"),
        ({"host_bytes": 1, "lookup_timeout": -1}, "between 0 and 3600"),
        ({"host_bytes": 1, "min_hits": 0}, "min_hits must be between"),
    ],
)
def test_configurations_that_are_refused(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pkv.PrefixCacheConfig(**fields)


ALL_KINDS = [LAYER, SLIDING_LAYER, MLA_LAYER]


def rows_of(cache: pkv.KVCache, seq_id: int, begin: int, end: int) -> list[np.ndarray]:
    """The rows of all layers; windows keep those from `begin` on."""
    k, v = (x.numpy() for x in cache.debug_get_kv(seq_id, begin, end))
    return [k, v, cache.debug_get_kv_mla(seq_id, begin, end).numpy()]


@pytest.mark.parametrize("kv_dtype", [*CODEC_NAMES, "float16", "float32"])
@pytest.mark.parametrize("write", ["back", "through"])
def test_rows_of_all_kinds_of_layers_come_back_bit_for_bit(kv_dtype, write):
    cache = make_quantized(ALL_KINDS, kv_dtype, max_total_tokens=64, max_num_sequences=2)
    pkv.open_prefix_cache(cache, pkv.PrefixCacheConfig(host_bytes=MB, write_policy=write))
    rng = np.random.default_rng(0)

    def run(prompt: list[int]) -> None:
        cache.add_sequence(0)
        for begin in range(0, len(prompt), 8):
            some = prompt[begin : begin + 8]
            with cache.forward([0], [len(some)], tokens=some):
                for layer, each in enumerate(ALL_KINDS):
                    width = each["qk_head_dim"]
                    if each["kind"] == "mla":
                        rows = rng.standard_normal((len(some), width)).astype("float32")
                        cache.append_mla_kv(layer, rows)
                        continue
                    shape = (len(some), each["num_qo_heads"] + 2 * each["num_kv_heads"], width)
                    cache.attention(layer, rng.standard_normal(shape).astype("float32"))

    prompt = list(range(24))
    run(prompt)
    first = max(cache.first_position(0, group) for group in range(3))
    expected = rows_of(cache, 0, first, 24)
    cache.remove_sequence(0)
    for begin in range(100, 400, 60):
        run(list(range(begin, begin + 60)))
        cache.remove_sequence(0)
    poison(cache)
    assert cache.add_sequence(0, [*prompt, 1]) == 24
    cache.check_integrity()
    stats = cache.stats()["prefix_tiers"]
    assert stats["reused_host_tokens"] == 24
    for actual, rows in zip(rows_of(cache, 0, first, 24), expected, strict=True):
        np.testing.assert_array_equal(actual, rows)


@latin_square(2, "windows", "with_store", "write")
@pytest.mark.parametrize("windows", [(0, 0), (0, 6), (6, 13)], ids=str)
@pytest.mark.parametrize("with_store", [False, True], ids=["host", "store"])
@pytest.mark.parametrize("write", ["back", "through", "selective"])
@parametrize_seed
def test_random_texts(windows, with_store, write, seed):
    """A pool and a host tier that are always full, a store that fails: all is as in a cold run."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    tiers = {"host_bytes": 40_000 if write == "selective" else 100_000, "write_policy": write}
    if with_store:
        tiers.update(store=FaultyStore(seed), model_id="m", lookup_timeout=0.5 * (seed % 2))
    fields = {"max_total_tokens": 120, "max_num_sequences": 4}
    texts = TieredTexts(windows, "normal", seed, tiers, **fields)
    prompts = [rng.integers(3, size=60).tolist() for _ in range(8)]
    given: dict[int, list[int]] = {}
    for _ in range(500):
        seq_id = int(rng.integers(4))
        length = int(rng.integers(8, 50))
        prompt = prompts[rng.integers(8)][:length] + rng.integers(3, size=2).tolist()
        salt = bytes(rng.integers(2, size=1).tolist())
        try:
            if seq_id in texts.tokens and rng.random() < 0.3:
                if windows == (0, 0) and texts.tokens[seq_id]:
                    texts.check_kv(seq_id)
                texts.finish(seq_id)
                del texts.tokens[seq_id]
            elif seq_id in texts.tokens:
                begin = len(texts.tokens[seq_id])
                more = given[seq_id][begin : begin + int(rng.integers(1, 33))]
                more = more or rng.integers(3, size=rng.integers(1, 9)).tolist()
                before = list(texts.tokens[seq_id])
                try:
                    texts.extend([seq_id], [more], aborts=rng.random() < 0.2)
                except pkv.CacheFullError:
                    texts.tokens[seq_id] = before
                    raise
            else:
                if rng.random() < 0.3:
                    texts.cache.prefetch(prompt, salt)
                given[seq_id] = prompt
                texts.start(seq_id, prompt, salt)
        except pkv.CacheFullError:
            for each in list(texts.tokens):
                texts.finish(each)
            texts.tokens.clear()
    stats = texts.tiers
    print(stats)
    assert stats["reused_host_tokens"] + stats["reused_store_tokens"] > 50
    assert stats["num_evicted_pages"] > 0
    texts.cache.close_prefixes(60)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
