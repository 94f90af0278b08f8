# SPDX-License-Identifier: Apache-2.0
"""Sequences that begin with the pages of earlier texts: exactly what a cold run computes."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ... import reference
from ...support.cases.caches.cache_cases import DIM, HEADS, MODES, NUM_KV_HEADS
from ...support.cases.caches.mla_cache_cases import MLAPair, make_mla_cache
from ...support.cases.kernels.kernel_specs import parametrize_seed
from ...support.emulators.python_kernels import poison
from ..layers.test_cache_sliding import Pair


class Texts(Pair):
    """Rows depend on the salt and on all tokens up to theirs, as those of a model do."""

    has_steady_matches = True  # nothing comes or goes between a match and an addition

    def __init__(self, windows=(0, 0), mode: str = "none", seed: int = 0, **fields):
        super().__init__(windows, mode, seed, **fields)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}

    def rows(self, seq_id: int, layer: int, begin: int, end: int) -> np.ndarray:
        seeds = [
            zlib.crc32(bytes([layer, *self.tokens[seq_id][: i + 1]]) + self.salts[seq_id])
            for i in range(begin, end)
        ]
        rows = [np.random.default_rng(s).standard_normal((HEADS, DIM)) for s in seeds]
        return np.asarray(rows, self.dtype).reshape(-1, HEADS, DIM)

    def start(self, seq_id: int, tokens: list[int], salt: bytes = b"") -> int:
        """Add a sequence with its prompt; the reference computes all of what is reused."""
        matched = self.cache.match_prefix(tokens, salt)
        reused = self.cache.add_sequence(seq_id, tokens, salt)
        self.cache.check_integrity()
        assert reused == matched or not self.has_steady_matches
        assert reused == self.cache.num_recorded_tokens(seq_id)
        assert reused == self.cache.sequence_length(seq_id) <= max(len(tokens) - 1, 0)
        self.expected.add_sequence(seq_id)
        self.tokens[seq_id], self.salts[seq_id] = list(tokens[:reused]), salt
        for layer in range(self.expected.num_layers if reused else 0):
            rows = self.rows(seq_id, layer, 0, reused)
            self.whole(layer, [seq_id], [reused], rows)
        return reused

    def extend(self, seq_ids: list[int], tokens: list[list[int]], aborts: bool = False) -> None:
        """A step that appends tokens, compared with the reference in every layer."""
        lengths = [len(each) for each in tokens]
        if aborts:
            flat = [token for each in tokens for token in each]
            with pytest.raises(KeyError), self.cache.forward(seq_ids, lengths, tokens=flat):
                raise KeyError
            self.cache.check_integrity()
            return
        for seq_id, each in zip(seq_ids, tokens, strict=True):
            self.tokens[seq_id] += each
        flat = [token for each in tokens for token in each]
        with self.cache.forward(seq_ids, lengths, tokens=flat):
            for layer in range(self.expected.num_layers):
                ends = [len(self.tokens[seq_id]) for seq_id in seq_ids]
                rows = [
                    self.rows(seq_id, layer, end - length, end)
                    for seq_id, length, end in zip(seq_ids, lengths, ends, strict=True)
                ]
                qkv = np.concatenate(rows)
                out = self.cache.attention(layer, qkv).numpy()
                o, _ = self.whole(layer, seq_ids, lengths, qkv)
                reference.assert_close(out, o, self.dtype, f"layer {layer} of {seq_ids}")
        self.cache.check_integrity()
        poison(self.cache)

    def run(self, seq_id: int, tokens: list[int], salt: bytes = b"") -> int:
        """A whole prompt; returns how much of it was reused."""
        reused = self.start(seq_id, tokens, salt)
        for begin in range(reused, len(tokens), 32):
            self.extend([seq_id], [tokens[begin : min(begin + 32, len(tokens))]])
        return reused

    def finish(self, seq_id: int) -> None:
        self.remove(seq_id)
        self.cache.check_integrity()

    def check_kv(self, seq_id: int) -> None:
        """K and V of a cache without windows."""
        k, v = (x.numpy() for x in self.cache.debug_get_kv(seq_id))
        for layer in range(self.expected.num_layers):
            rows = self.expected.kv(seq_id, layer)
            reference.assert_close(k[layer], rows[0], self.dtype, f"K of {seq_id}")
            reference.assert_close(v[layer], rows[1], self.dtype, f"V of {seq_id}")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_was_computed_before(mode, page_size):
    texts = Texts((0, 0), mode, page_size=page_size)
    prompt = list(range(50))
    assert texts.run(0, prompt) == 0
    texts.finish(0)
    assert texts.run(1, prompt) == 49  # the last token is computed again
    texts.check_kv(1)
    assert texts.run(2, [*prompt[:31], 99]) == 31  # a copy of a page that branches within
    texts.check_kv(2)
    assert texts.run(3, [99, *prompt]) == 0
    stats = texts.cache.stats()
    assert (stats["num_prefix_lookups"], stats["num_prefix_hits"]) == (4, 2)
    assert (stats["num_looked_up_tokens"], stats["num_reused_tokens"]) == (50 + 50 + 32 + 51, 80)
    texts.cache.clear()
    assert texts.cache.match_prefix(prompt) == 0
    stats = texts.cache.stats()
    assert stats["num_findable_tokens"] == 0 and stats["num_free_pages"] == stats["num_pages"]


@pytest.mark.parametrize("windows", [(0, 6), (6, 13), (0, -14)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_windows_need_what_lies_before_the_hit_only(mode, windows):
    texts = Texts(windows, mode, page_size=4, max_total_tokens=512, max_num_sequences=8)
    prompt = list(range(90))
    texts.run(0, prompt)
    texts.finish(0)
    assert texts.run(1, [*prompt, 1, 2, 3]) == 90
    assert texts.run(2, [*prompt[:60], 1, 2, 3]) == 60  # pages that the windows have left behind
    assert texts.cache.first_position(2, 1) > 0
    texts.extend([1, 2], [[4], [5]])


def test_a_sequence_in_progress_is_found_by_its_full_pages():
    texts = Texts(page_size=4)
    texts.start(0, [])
    texts.extend([0], [[1, 2, 3, 4, 5, 6]])
    assert texts.cache.match_prefix([1, 2, 3, 4, 5, 6, 7]) == 4
    texts.extend([0], [[7, 8]])
    assert texts.cache.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert texts.run(1, [1, 2, 3, 4, 5, 6, 7, 9]) == 7
    texts.extend([0, 1], [[9], [10]])
    texts.check_kv(0)
    texts.check_kv(1)


def test_only_committed_rows_of_completed_steps_are_found():
    texts = Texts(page_size=4)
    cache = texts.cache
    texts.start(0, [])
    texts.extend([0], [[1, 2, 3, 4, 5]], aborts=True)
    assert cache.match_prefix([1, 2, 3, 4, 5]) == cache.num_recorded_tokens(0) == 0
    with cache.forward([0], [4], tokens=[1, 2, 3, 4]):
        assert cache.match_prefix([1, 2, 3, 4, 5]) == 0
        for layer in range(2):
            cache.attention(layer, texts.qkv(4))
    assert cache.match_prefix([1, 2, 3, 4, 5]) == 4
    cache.pop_n(0, 2)
    assert cache.num_recorded_tokens(0) == 2
    with cache.forward([0], [2], tokens=[7, 8]):
        for layer in range(2):
            cache.attention(layer, texts.qkv(2))
    assert cache.match_prefix([1, 2, 7, 8, 9]) == 4  # beside what was popped
    assert cache.match_prefix([1, 2, 3, 4, 5]) == 4
    cache.begin_forward([0], [2], [-1, 0])
    with pytest.raises(ValueError, match="at most 0 more, got 1"):
        cache.record_tokens(0, [9])
    for layer in range(2):
        cache.attention(layer, texts.qkv(2))
    cache.end_forward()
    cache.commit_tree([0], [1])
    cache.record_tokens(0, [9, 10])
    with pytest.raises(ValueError, match="nodes of token trees"):
        cache.begin_forward([0], [1], [-1], tokens=[1])
    assert not cache.is_in_forward and cache.sequence_length(0) == 6
    cache.check_integrity()


def test_rows_that_are_received_are_not_found():
    texts = Texts(page_size=4)
    cache = texts.cache
    cache.add_sequence(0)
    tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")(cache, 0, 6)
    with pytest.raises(ValueError, match="has 0 committed positions"):
        cache.record_tokens(0, [1, 2])


def test_salts_never_meet():
    texts = Texts(page_size=4)
    prompt = list(range(12))
    texts.run(0, prompt)
    texts.run(1, prompt, b"adapter")
    for seq_id in (0, 1):
        texts.finish(seq_id)
    assert texts.run(2, prompt) == texts.run(3, prompt, b"adapter") == 11
    assert texts.cache.match_prefix(prompt, b"adapter\0") == 0
    texts.extend([2, 3], [[1], [1]])
    texts.check_kv(2)
    texts.check_kv(3)


def test_the_end_of_the_least_recently_used_text_goes_first():
    texts = Texts(page_size=4, max_total_tokens=64, max_num_sequences=2)
    one, other = list(range(20)), list(range(100, 120))
    for seq_id, prompt in enumerate((one, other)):
        texts.run(seq_id, prompt)
        texts.finish(seq_id)
    texts.run(2, one)  # used again
    texts.finish(2)
    texts.start(3, [])
    for count, matches in ((24, (19, 19)), (4, (19, 16)), (8, (19, 8)), (8, (19, 0)), (4, (16, 0))):
        texts.extend([3], [[200] * count])
        found = tuple(texts.cache.match_prefix(prompt) for prompt in (one, other))
        assert found == matches


def test_what_is_overwritten_is_not_found():
    texts = Texts(page_size=4)
    prompt = list(range(10))
    texts.run(0, prompt)
    rows = np.zeros((2, 2, NUM_KV_HEADS, DIM), "float32")
    texts.cache.debug_set_kv(0, 1, rows, rows)
    assert texts.cache.num_recorded_tokens(0) == 0
    texts.cache.check_integrity()
    assert texts.run(1, prompt) == 8  # a copy was written
    texts.check_kv(1)


def test_forks_keep_their_tokens():
    texts = Texts(page_size=4)
    prompt = list(range(10))
    texts.run(0, prompt)
    texts.fork(0, 1, 7)
    texts.tokens[1], texts.salts[1] = prompt[:7], b""
    assert texts.cache.num_recorded_tokens(1) == 7
    texts.extend([1], [[50, 51]])
    texts.finish(0)
    texts.finish(1)
    assert texts.run(2, [*prompt[:7], 50, 51, 52]) == 9
    assert texts.run(3, [*prompt, 11]) == 10
    texts.check_kv(2)
    texts.check_kv(3)


def test_mla_layers():
    pair = MLAPair(make_mla_cache())
    prompt = list(range(10))
    pair.add(0)
    pair.step([0], [10], "prefill")
    pair.cache.record_tokens(0, prompt)
    pair.expected.fork_sequence(0, 1, 9)
    pair.remove(0)
    assert pair.cache.add_sequence(1, prompt) == 9
    pair.check_rows()
    pair.step([1], [1], "decode")
    pair.step([1], [3], "extend")
    pair.check_rows()


def test_errors_change_nothing():
    cache = Texts(page_size=4).cache
    cache.add_sequence(0, [1, 2, 3])
    for tokens, message in (
        ([-1], r"in \[0, 2147483647\]"),
        ([2**31], r"got 2147483648 at index 0"),
    ):
        for call in (
            lambda tokens=tokens: cache.add_sequence(1, tokens),
            lambda tokens=tokens: cache.match_prefix(tokens),
            lambda tokens=tokens: cache.begin_forward([0], [1], tokens=tokens),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="tokens of its 2 rows, got 1"):
        cache.begin_forward([0], [2], tokens=[1])
    with pytest.raises(ValueError, match="sequence 0 is in the cache already"):
        cache.add_sequence(0, [1])
    with pytest.raises(TypeError, match="salt must be bytes"):
        cache.add_sequence(1, [1], "salt")
    with pytest.raises(TypeError):
        cache.add_sequence(1, [1.5])
    with pytest.raises(KeyError):
        cache.record_tokens(7, [1])
    assert cache.sequence_ids() == [0] and not cache.is_in_forward
    assert cache.sequence_length(0) == 0
    cache.check_integrity()


@pytest.mark.parametrize("windows", [(0, 0), (0, 6), (6, 13), (-6, -13)], ids=str)
@parametrize_seed
def test_random_texts(windows, seed):
    """Sequences come and go in a cache that is always full; every output is that of a cold run."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    fields = {"page_size": 4, "max_total_tokens": 160, "max_num_sequences": 4}
    texts = Texts(windows, "normal", seed, **fields)
    prompts = [rng.integers(3, size=60).tolist() for _ in range(4)]
    num_reused = 0
    for _ in range(600):
        seq_id = int(rng.integers(4))
        length = int(rng.integers(1, 40))
        prompt = prompts[rng.integers(4)][:length] + rng.integers(3, size=2).tolist()
        try:
            if seq_id in texts.tokens and rng.random() < 0.4:
                texts.finish(seq_id)
                del texts.tokens[seq_id]
            elif seq_id in texts.tokens:
                ids = [i for i in texts.tokens if i == seq_id or rng.random() < 0.5]
                more = [rng.integers(3, size=rng.integers(1, 4)).tolist() for _ in ids]
                before = {i: list(texts.tokens[i]) for i in ids}
                try:
                    texts.extend(ids, more, aborts=rng.random() < 0.2)
                except pkv.CacheFullError:
                    texts.tokens.update(before)
                    raise
            else:
                salt = bytes(rng.integers(2, size=1).tolist())
                num_reused += texts.start(seq_id, prompt, salt)
        except pkv.CacheFullError:
            for each in list(texts.tokens):
                texts.finish(each)
            texts.tokens.clear()
    assert num_reused > 100
    assert texts.cache.stats()["num_reclaimed_pages"] > 10


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
