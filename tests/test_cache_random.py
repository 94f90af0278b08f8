# SPDX-License-Identifier: Apache-2.0
"""Random operations against the reference, with failing calls in between that change nothing."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

import tvm_pagedkv as pkv

from . import reference
from .python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    poison,
    share_every_prefix,
    shuffle,
    snapshot,
)

DIM, CHUNK, MAX_SEQUENCES = 4, 12, 6
SHAPE = {**LAYER, "num_qo_heads": 2, "num_kv_heads": 1, "qk_head_dim": DIM}
NUM_OPERATIONS = 600
POPPABLE = 16
# Windows of the layers: none; some, of two sizes; all.
WINDOWS = {"global": (0, 0), "mixed": (0, 5, 0, 9, 5), "sliding": (6, 6)}


def layer_of(window: int) -> dict:
    return {**SHAPE, "kind": "mha_sliding", "window": window} if window else SHAPE


class KeptPositions:
    """From where on the layers of one window keep the positions of each sequence."""

    def __init__(self, window: int, page_size: int):
        self.window, self.page_size, self.first = window, page_size, {}

    def visible(self, length: int) -> int:
        """First position that the next row sees."""
        return max(0, length - self.window + 1) if self.window else 0

    def slide(self, seq_id: int, length: int) -> None:
        keep = max(0, self.visible(length) - POPPABLE) // self.page_size * self.page_size
        self.first[seq_id] = max(self.first[seq_id], keep)

    def can_continue(self, seq_id: int, length: int) -> bool:
        return length == 0 or self.visible(length) >= self.first[seq_id]

    def num_pages(self, seq_id: int, length: int) -> int:
        return -(-length // self.page_size) - self.first[seq_id] // self.page_size


class Driver:
    """Draws operations and applies each to the cache and to the reference."""

    kernels, reference_class = KERNELS, reference.ReferenceCache
    fields: dict = {}

    def __init__(self, seed: int, page_size: int, aux_manager: str, windows: tuple[int, ...]):
        self.rng = np.random.default_rng(seed)
        self.page_size, self.num_layers = page_size, len(windows)
        # With windows long sequences are of interest.
        self.max_total_tokens = max(40 * page_size, 160 if any(windows) else 0)
        self.kept = [KeptPositions(window, page_size) for window in dict.fromkeys(windows)]
        self.copy_fails = False
        self.cache = make_cache(
            {**self.kernels, "copy_single_page": self.copy_single_page},
            layers=[self.layer_of(window) for window in windows],
            max_num_sequences=MAX_SEQUENCES,
            max_total_tokens=self.max_total_tokens,
            prefill_chunk_size=CHUNK,
            page_size=page_size,
            aux_manager=aux_manager,
            **self.fields,
        )
        share_every_prefix(self.cache)
        self.expected = self.reference_class(len(windows), np.dtype("float32"), windows=windows)
        self.next_id = 0
        self.counts: dict[str, int] = {}

    def layer_of(self, window: int) -> dict:
        return layer_of(window)

    def copy_single_page(self, *args) -> None:
        if self.copy_fails:
            raise RuntimeError("the copy fails")
        KERNELS["copy_single_page"](*args)

    @property
    def ids(self) -> list[int]:
        return list(self.expected.sequences)

    def pick(self) -> int:
        return int(self.rng.choice(self.ids))

    def new_id(self) -> int:
        self.next_id += int(self.rng.integers(1, 4))
        return self.next_id * (-1 if self.rng.random() < 0.2 else 1)

    # What the pages hold of a sequence; a length counts what the sequence holds.

    def text_length(self, seq_id: int, length: int) -> int:
        """Positions that were appended up to the end of the first `length`."""
        return length

    def text_positions(self, seq_id: int, begin: int, end: int) -> np.ndarray:
        """Where positions are in the rows of the reference."""
        return np.arange(begin, end)

    def num_pages(self, kept: KeptPositions, seq_id: int) -> int:
        return kept.num_pages(seq_id, self.expected.length(seq_id))

    def first_position(self, kept: KeptPositions, seq_id: int) -> int:
        return kept.first[seq_id]

    # Operations that succeed.

    def add(self) -> None:
        if len(self.ids) < MAX_SEQUENCES:
            seq_id = self.new_id()
            self.cache.add_sequence(seq_id)
            self.expected.add_sequence(seq_id)
            for kept in self.kept:
                kept.first[seq_id] = 0

    def refused(self, seq_id: int, length: int, call) -> bool:
        """Whether a window no longer has what comes before `length`; then `call` must fail."""
        text_length = self.text_length(seq_id, length)
        if all(kept.can_continue(seq_id, text_length) for kept in self.kept):
            return False
        before = snapshot(self.cache, self.ids)
        with pytest.raises(ValueError, match="keep positions from"):
            call()
        assert snapshot(self.cache, self.ids) == before
        self.counts["refused"] = self.counts.get("refused", 0) + 1
        return True

    def fork(self) -> None:
        if len(self.ids) < MAX_SEQUENCES and self.ids:
            parent, child = self.pick(), self.new_id()
            end = self.expected.committed_length(parent)
            has_tree = end < self.expected.length(parent)
            position = int(self.rng.integers(0 if has_tree else -1, end + 1))
            length = end if position == -1 else position
            if self.refused(
                parent, length, lambda: self.cache.fork_sequence(parent, child, position)
            ):
                return
            self.cache.fork_sequence(parent, child, position)
            self.expected.fork_sequence(parent, child, position)
            for kept in self.kept:
                kept.first[child] = kept.first[parent] if length else 0

    def pop(self) -> None:
        if self.ids:
            seq_id = self.pick()
            n = int(self.rng.integers(0, self.expected.length(seq_id) + 1))
            n = min(n, int(self.rng.integers(0, 8 if self.rng.random() < 0.8 else 40)))
            length = self.expected.length(seq_id) - n
            length = min(length, self.expected.committed_length(seq_id))
            if self.refused(seq_id, length, lambda: self.cache.pop_n(seq_id, n)):
                return
            self.cache.pop_n(seq_id, n)
            self.expected.pop_n(seq_id, n)
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """An empty sequence may begin anew."""
        if self.expected.length(seq_id) == 0:
            for kept in self.kept:
                kept.first[seq_id] = 0

    def remove(self) -> None:
        if len(self.ids) > 2:
            seq_id = self.pick()
            self.cache.remove_sequence(seq_id)
            self.expected.remove_sequence(seq_id)

    def step(self) -> None:
        if not self.ids:
            return
        batch = self.draw_batch()
        lengths = [1] * len(batch)
        if self.rng.random() < 0.5:
            share = CHUNK // len(batch)
            lengths = [int(self.rng.integers(1, share + 1)) for _ in batch]
        self.run_step(batch, lengths)

    def run_step(self, batch: list[int], lengths: list[int], parents=None) -> None:
        """Begin, attend and end, or find that there are too few pages."""
        before = snapshot(self.cache, self.ids)
        try:
            self.cache.begin_forward(batch, lengths, parents)
        except pkv.CacheFullError as error:
            assert self.may_fill_first(str(error))
            self.counts["full"] = self.counts.get("full", 0) + 1
            assert snapshot(self.cache, self.ids) == before
            self.make_room()
            return
        if parents is not None:
            self.expected.grow_trees(batch, lengths, parents)
        for layer in range(self.num_layers):
            self.attend(layer, batch, lengths)
        self.cache.check_integrity()
        self.cache.end_forward()
        self.slide(batch)

    def may_fill_first(self, message: str) -> bool:
        """Whether the group of the message may be the first to run out of pages.

        Layers with a window never do before those without, if sequences have none.
        """
        has_windows = self.kept[0].window or self.fields.get("sliding_window")
        return has_windows or len(self.kept) == 1 or "group 0" in message

    def attend(self, layer: int, batch: list[int], lengths: list[int]) -> None:
        """Append and attend in one layer."""
        qkv = self.rng.standard_normal((sum(lengths), 4, DIM)).astype("float32")
        out = self.cache.attention(layer, qkv).numpy()
        o, _ = self.expected.attention(layer, batch, lengths, qkv, 1, DIM**-0.5)
        reference.assert_close(out, o, "float32", f"{batch} {lengths} layer {layer}")

    def slide(self, batch: list[int]) -> None:
        for kept in self.kept:
            for seq_id in batch:
                length = self.expected.committed_length(seq_id)
                kept.slide(seq_id, self.text_length(seq_id, length))

    def draw_batch(self) -> list[int]:
        size = int(self.rng.integers(1, len(self.ids) + 1))
        return [int(i) for i in self.rng.permutation(self.ids)[:size]]

    def make_room(self) -> None:
        longest = max(self.ids, key=self.expected.length)
        self.cache.remove_sequence(longest)
        self.expected.remove_sequence(longest)

    def write(self) -> None:
        """debug_set_kv into a range that forks may share."""
        if not self.ids:
            return
        seq_id = self.pick()
        length = self.expected.length(seq_id)
        if length == 0:
            return
        first = max(self.first_position(kept, seq_id) for kept in self.kept)
        begin = int(self.rng.integers(min(first, length), length + 1))
        end = int(self.rng.integers(begin, length + 1))
        with suppress(pkv.CacheFullError):
            written = self.set_rows(seq_id, begin, end)
            for layer in range(self.num_layers):
                rows = [x.copy() for x in self.expected.sequences[seq_id][layer]]
                for row, new in zip(rows, written, strict=True):
                    row[self.text_positions(seq_id, begin, end)] = new[layer]
                self.expected.sequences[seq_id][layer] = tuple(rows)

    def set_rows(self, seq_id: int, begin: int, end: int) -> tuple[np.ndarray, ...]:
        """Write random rows and return them, each ``[num_layers, end - begin, ...]``."""
        shape = (2, self.num_layers, end - begin, 1, DIM)
        k, v = self.rng.standard_normal(shape).astype("float32")
        self.cache.debug_set_kv(seq_id, begin, k, v)
        return k, v

    def get_rows(self, seq_id: int, begin: int) -> tuple[np.ndarray, ...]:
        """Rows of a sequence from `begin` on."""
        return tuple(x.numpy() for x in self.cache.debug_get_kv(seq_id, begin))

    # Calls that fail.

    def fail(self) -> None:
        before = snapshot(self.cache, self.ids)
        cache, some, unknown = self.cache, self.ids[0] if self.ids else 10**6, 10**9
        calls = [
            (KeyError, lambda: cache.remove_sequence(unknown)),
            (KeyError, lambda: cache.pop_n(unknown, 0)),
            (KeyError, lambda: cache.fork_sequence(unknown, 10**8)),
            (
                KeyError,
                lambda: cache.begin_forward([*self.ids, unknown], [1] * len(self.ids) + [1]),
            ),
            (ValueError, lambda: cache.begin_forward([], [])),
            (ValueError, lambda: cache.end_forward()),
            (ValueError if self.ids else KeyError, lambda: cache.begin_forward([some], [1], [0])),
        ]
        if self.ids:
            length = self.expected.length(some)
            calls += [
                (ValueError, lambda: cache.add_sequence(some)),
                (ValueError, lambda: cache.fork_sequence(some, some)),
                (ValueError, lambda: cache.fork_sequence(some, 10**8, length + 1)),
                (ValueError, lambda: cache.pop_n(some, length + 1)),
                (ValueError, lambda: cache.pop_n(some, -1)),
                (ValueError, lambda: cache.begin_forward([some, some], [1, 1])),
                (ValueError, lambda: cache.begin_forward([some], [0])),
                (ValueError, lambda: cache.begin_forward([some], [CHUNK + 1])),
                (ValueError, lambda: cache.begin_forward([some], [1, 1])),
            ]
        error, call = calls[self.rng.integers(len(calls))]
        with pytest.raises(error):
            call()
        assert snapshot(cache, self.ids) == before

    def fail_copy(self) -> None:
        """A step whose page copies fail, when it needs any."""
        if not self.ids:
            return
        before = snapshot(self.cache, self.ids)
        self.copy_fails = True
        try:
            batch = self.draw_batch()
            self.cache.begin_forward(batch, [1] * len(batch))
        except RuntimeError:  # the copy or CacheFullError
            self.counts["failed copy"] = self.counts.get("failed copy", 0) + 1
            assert snapshot(self.cache, self.ids) == before
        else:
            self.take_back(batch)
        finally:
            self.copy_fails = False

    def take_back(self, batch: list[int]) -> None:
        """End a step of one row each that nothing was written in, and pop the rows."""
        self.cache.end_forward()
        for kept in self.kept:
            for seq_id in batch:
                kept.slide(seq_id, self.expected.length(seq_id) + 1)
        for seq_id in batch:
            self.cache.pop_n(seq_id, 1)
            self.forget(seq_id)

    def run(self) -> None:
        operations = {
            self.step: 0.42, self.add: 0.1, self.fork: 0.14, self.pop: 0.06, self.remove: 0.05,
            self.write: 0.05, self.fail: 0.1, self.fail_copy: 0.08,
        }  # fmt: skip
        for i in range(NUM_OPERATIONS):
            operation = self.rng.choice(list(operations), p=list(operations.values()))
            operation()
            self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1
            self.cache.check_integrity()
            self.check_counters()
            if i % 5 == 0:
                shuffle(self.cache, i)
                poison(self.cache)
            if i % 20 == 0:
                self.check_rows()

    def check_counters(self) -> None:
        lengths = {seq_id: self.expected.length(seq_id) for seq_id in self.ids}
        stats = self.cache.stats()
        assert {i: self.cache.sequence_length(i) for i in self.ids} == lengths
        assert self.cache.total_length() == stats["total_tokens"] == sum(lengths.values())
        assert stats["num_sequences"] == len(lengths)
        free = {}
        for g, (kept, group) in enumerate(zip(self.kept, stats["groups"], strict=True)):
            tables = {seq_id: self.cache.page_table(seq_id, g) for seq_id in self.ids}
            for seq_id, table in tables.items():
                assert self.cache.first_position(seq_id, g) == self.first_position(kept, seq_id)
                assert len(table) == self.num_pages(kept, seq_id)
            assert group["window"] == kept.window
            assert group["num_used_pages"] == len({p for table in tables.values() for p in table})
            assert group["num_pages"] <= -(-self.max_total_tokens // self.page_size)
            free[kept.window] = group["num_free_pages"]
        least = min(free.values())
        expected = least if self.fields.get("sliding_window") else free.get(0, least)
        assert self.cache.num_available_pages() == expected

    def check_rows(self) -> None:
        for seq_id in self.ids:
            begin = max(self.first_position(kept, seq_id) for kept in self.kept)
            actual = self.get_rows(seq_id, begin)
            for layer in range(self.num_layers):
                if self.expected.sequences[seq_id][layer] is not None:
                    rows = self.expected.kv(seq_id, layer)
                    for got, want in zip(actual, rows, strict=True):
                        np.testing.assert_array_equal(got[layer], want[begin:])
            if begin:
                with pytest.raises(IndexError, match=f"position {begin - 1} .* is gone"):
                    self.cache.debug_get_kv(seq_id, begin - 1)


class LatentDriver(Driver):
    """The same for MLA layers: in turn cross attention alone, and self and cross attention."""

    kernels, reference_class = MLA_KERNELS, reference.ReferenceLatentCache

    def layer_of(self, window: int) -> dict:
        return MLA_LAYER

    def attend(self, layer: int, batch: list[int], lengths: list[int]) -> None:
        num_rows = sum(lengths)
        latent = self.rng.standard_normal((num_rows, 24)).astype("float32")
        q = self.rng.standard_normal((num_rows, 4, 24)).astype("float32")
        self.cache.append_mla_kv(layer, latent)
        self.expected.append(layer, batch, lengths, latent)
        is_whole = self.covers_step(batch, lengths) and self.rng.random() < 0.5
        if not is_whole:
            k = self.rng.standard_normal((num_rows, 4, 16)).astype("float32")
            self.cache.self_attention(layer, k, k, k[:, :, :8])
        out = [x.numpy() for x in self.cache.cross_attention(layer, q, 0.25)]
        want = self.expected.absorbed(layer, batch, lengths, q, 16, 0.25, with_step=is_whole)
        for got, expected in zip(out, want, strict=True):
            reference.assert_close(got, expected, "float32", f"{batch} {lengths} layer {layer}")

    def covers_step(self, batch: list[int], lengths: list[int]) -> bool:
        """Whether cross attention alone attends to the rows of the step as well."""
        return sum(lengths) == len(batch)

    def set_rows(self, seq_id: int, begin: int, end: int) -> tuple[np.ndarray, ...]:
        shape = (self.num_layers, end - begin, 24)
        latent = self.rng.standard_normal(shape).astype("float32")
        self.cache.debug_set_kv_mla(seq_id, begin, latent)
        return (latent,)

    def get_rows(self, seq_id: int, begin: int) -> tuple[np.ndarray, ...]:
        return (self.cache.debug_get_kv_mla(seq_id, begin).numpy(),)


def check(driver: Driver) -> None:
    driver.run()
    stats = driver.cache.stats()
    num_saved = stats["pages_read_without_sharing"] - stats["pages_read"]
    assert num_saved > 0 or all(kept.window for kept in driver.kept)
    print(driver.counts, driver.cache.stats()["cow_page_copies"])
    assert driver.counts["step"] > 100
    assert driver.page_size == 1 or driver.cache.stats()["cow_page_copies"] > 0


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(seed, page_size, aux_manager):
    check(Driver(seed, page_size, aux_manager, WINDOWS["global"]))


@pytest.mark.parametrize("windows", ["mixed", "sliding"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_with_windows(seed, page_size, windows):
    driver = Driver(seed, page_size, "merged", WINDOWS[windows])
    check(driver)
    assert driver.counts["refused"] > 0


@pytest.mark.parametrize("page_size, aux_manager", [(1, "plain"), (4, "merged"), (16, "merged")])
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_with_mla(seed, page_size, aux_manager):
    check(LatentDriver(seed, page_size, aux_manager, WINDOWS["global"]))
