# SPDX-License-Identifier: Apache-2.0
"""Decode steps on a GPU whose arrays a kernel makes of those of the last step.

The device and that kernel are emulated; the other kernels are in NumPy, and note the int32 arrays
that they get. A cache without the kernel plans every step anew and copies all arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ..support.cases.caches.cache_cases import DIM, HEADS, PlainPair, layer_of
from ..support.cases.kernels.attention_cases import cuda_text
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.emulators.cuda_emulator import library
from ..support.emulators.cuda_emulator.translate import translate
from ..support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    copy_pages,
    make_cache,
    share_every_prefix,
    shuffle,
    view,
)
from .test_cuda_streams import RACE, other_stream

PAGE_SIZE = 4


def advance_arrays() -> Callable:
    """The kernel, for the emulated device."""
    text = cuda_text("advance_arrays", make_spec((4, 2), 8, page=PAGE_SIZE))
    return library.load(translate(text, on_device=True)).get_function("advance_arrays")


class Launches:
    """What a cache has launched. It does not hold the cache, which ends with its test.

    Attributes
    ----------
    arrays : list
        Of each launch the kernel's name and its int32 arrays.
    num_advances : int
    fails : bool
        Whether the next launch of `advance_arrays` fails.
    """

    def __init__(self):
        self.arrays: list[tuple[str, list[np.ndarray]]] = []
        self.num_advances, self.fails = 0, False

    def noting(self, name: str, kernel: Callable) -> Callable:
        """Return a kernel whose launches are noted."""

        def noting(*args):
            given = [view(x) for x in args if getattr(x, "dtype", None) == "int32"]
            self.arrays.append((name, [x.copy() for x in given]))
            kernel(*args)

        return noting

    def advancing(self, kernel: Callable) -> Callable:
        """Return `advance_arrays`, counted, which fails when it is told to."""

        def advance(*args):
            if self.fails:
                self.fails = False
                raise RuntimeError("not launched")
            kernel(*args)
            self.num_advances += 1

        return advance


class Pair(PlainPair):
    """A cache on the device, whose launches are noted, beside the reference."""

    def __init__(self, device, continues: bool, shares: bool = False, **fields):
        self.continues, self.launches = continues, Launches()
        noted = {**KERNELS, "copy_pages": copy_pages}
        kernels = device.kernels({n: self.launches.noting(n, k) for n, k in noted.items()})
        if continues:
            kernels["advance_arrays"] = self.launches.advancing(advance_arrays())
        fields = {"max_total_tokens": 1024, "page_size": PAGE_SIZE} | fields
        cache = make_cache(kernels, device=device.device, **fields)
        super().__init__(cache)
        shuffle(cache, 3)
        if shares:
            share_every_prefix(cache)

    def abort(self, seq_ids: list[int]) -> None:
        """Begin a step that is aborted when one layer has appended its rows."""
        lengths = [1] * len(seq_ids)
        self.cache.begin_forward(seq_ids, lengths)
        self.cache.attention(0, self.qkv(len(seq_ids)))
        self.cache.abort_forward()

    def fail(self, seq_ids: list[int]) -> None:
        """Take a step that cannot begin, for the kernel that makes its arrays is not launched."""
        lengths = [1] * len(seq_ids)
        self.step(seq_ids, lengths)
        if self.continues:
            self.launches.fails = True
            with pytest.raises(RuntimeError, match="not launched"):
                self.cache.begin_forward(seq_ids, lengths)
            self.cache.check_integrity()


def assert_same_arrays(continuing: Pair, planned: Pair) -> None:
    """Compare what the kernels of two caches got, and forget it."""
    found, expected = continuing.launches.arrays, planned.launches.arrays
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, actual), (_, wanted) in zip(found, expected, strict=True):
        for x, y in zip(actual, wanted, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
    found.clear()
    expected.clear()


class RandomBatch:
    """A batch of sequences of two caches, and random calls in between its steps."""

    def __init__(self, pairs: list[Pair], rng: np.random.Generator):
        self.pairs, self.rng = pairs, rng
        self.batch: list[int] = []
        self.next_id = 0
        for _ in range(3):
            self.add()

    def each(self, call: str, *args) -> None:
        for pair in self.pairs:
            getattr(pair, call)(*args)

    def add(self) -> None:
        if len(self.batch) < 6:
            self.each("add", self.next_id)
            self.each("step", [self.next_id], [int(self.rng.integers(1, 12))])
            self.batch.append(self.next_id)
            self.next_id += 1

    def pick(self) -> int:
        return int(self.rng.choice(self.batch))

    def fork(self) -> None:
        if len(self.batch) < 6:
            self.each("fork", self.pick(), self.next_id)
            self.batch.append(self.next_id)
            self.next_id += 1

    def remove(self) -> None:
        if len(self.batch) > 2:
            seq_id = self.pick()
            self.each("remove", seq_id)
            self.batch.remove(seq_id)

    def pop(self) -> None:
        seq_id = self.pick()
        length = self.pairs[0].expected.length(seq_id)
        self.each("pop", seq_id, int(self.rng.integers(1, min(length, 5) + 1)))

    def shuffle(self) -> None:
        self.rng.shuffle(self.batch)

    def prefill(self) -> None:
        self.each("step", [self.pick()], [int(self.rng.integers(2, 9))])

    def one_alone(self) -> None:
        self.each("step", [self.pick()], [1])

    def abort(self) -> None:
        self.each("abort", list(self.batch))

    def fail(self) -> None:
        self.each("fail", list(self.batch))

    def read(self) -> None:
        for pair in self.pairs:
            pair.cache.sequence_length(self.batch[0])

    def run(self, num_rounds: int) -> None:
        calls = [
            *(self.add, self.fork, self.remove, self.pop, self.shuffle, self.prefill),
            *(self.one_alone, self.abort, self.fail, self.read),
        ]
        for _ in range(num_rounds):
            call = calls[self.rng.integers(len(calls))]
            call()
            for _ in range(int(self.rng.integers(1, 7))):
                self.each("step", list(self.batch), [1] * len(self.batch))
            try:
                assert_same_arrays(*self.pairs)
            except AssertionError as error:
                error.add_note(f"after {call.__name__}")
                raise


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared prefixes"])
@pytest.mark.parametrize("seed", [0, 1], ids="seed{}".format)
def test_arrays_and_results_are_those_of_new_plans(device, seed, shares):
    print("seed", seed)
    pairs = [Pair(device, continues, shares) for continues in (True, False)]
    batch = RandomBatch(pairs, np.random.default_rng(seed))
    batch.run(40)
    assert pairs[0].launches.num_advances > 40 and pairs[1].launches.num_advances == 0
    for pair in pairs:
        pair.check_rows()
    device.wait_for_all()


def test_a_step_copies_the_pages_that_begin(device):
    """However many pages the sequences have: 4 bytes of each that begins, and a page table's row.

    Every array of a layer group begins at a multiple of 64 bytes.
    """
    pair = Pair(device, True)
    pair.add(0, 1)
    for _ in range(12):
        pair.step([0, 1], [16, 16])
    pair.step([0, 1], [1, 1])
    copied, num_advances = pair.cache.stats()["aux_bytes_copied"], pair.launches.num_advances
    for _ in range(8):
        pair.step([0, 1], [1, 1])
    stats = pair.cache.stats()
    assert pair.launches.num_advances == num_advances + 8
    assert stats["aux_bytes_copied"] - copied <= 8 * (7 * 4 * 8 + 3 * 64)


@pytest.mark.parametrize(
    "fields",
    [{"layers": [layer_of(64), layer_of(64)]}, {"aux_manager": "plain"}],
    ids=["windows of layers", "plain arrays"],
)
def test_other_steps_copy_all_arrays(device, fields):
    pair = Pair(device, True, **fields)
    pair.add(0, 1)
    for _ in range(6):
        pair.step([0, 1], [1, 1])
    assert pair.launches.num_advances == 0


def test_groups_of_layers_have_page_tables_of_their_own(device):
    """K and V lie in two pools, whose pages differ."""
    layers = [LAYER, {**LAYER, "kv_dtype": "float16"}]
    pairs = [Pair(device, continues, layers=layers) for continues in (True, False)]
    rows = np.zeros((2, HEADS, DIM), "float32")
    for pair in pairs:
        pair.add(0, 1)
        for length in (7, *[1] * 11):
            with pair.cache.forward([0, 1], [length, 1]):
                for layer in range(2):
                    pair.cache.attention(layer, rows[:1].repeat(length + 1, 0)).numpy()
    assert_same_arrays(*pairs)
    assert pairs[0].launches.num_advances == 10 and len(pairs[0].cache.stats()["groups"]) == 2


def test_steps_on_other_streams(device):
    pairs = [Pair(device, continues) for continues in (True, False)]
    for pair in pairs:
        pair.add(0, 1)
        pair.step([0, 1], [6, 3])
        for i in range(9):
            if i % 3 == 0:
                pair.step([0, 1], [1, 1])
            else:
                with other_stream(device):
                    pair.step([0, 1], [1, 1])
    assert_same_arrays(*pairs)
    assert pairs[0].launches.num_advances == 8


def run_ahead(device, kinds: str, dropped: int) -> tuple[list[tuple[int, str]], bool]:
    """Take steps, and let an event have no effect.

    Parameters
    ----------
    kinds : str
        A letter for each step: "c" where it continues the last one, "f" where all arrays are
        copied.
    dropped : int
        Number of the event; -1: none.

    Returns
    -------
    events : list of (int, str)
        Of each the step, and its kind of step with the number of the event in it.
    is_refused : bool
        Whether the device found that something races.
    """
    pair, batch = Pair(device, True), [0, 1]
    pair.add(*batch)
    inputs, outputs, events = device.put(pair.qkv(2)), [], []
    try:
        with device.without_event(dropped):
            for step, kind in enumerate(kinds):
                batch = batch if kind == "c" else batch[::-1]
                begin = device.num_events()
                with pair.cache.forward(batch, [1, 1]):
                    events += [(step, f"{kind}{i}") for i in range(device.num_events() - begin)]
                    outputs += [pair.cache.attention(layer, inputs) for layer in range(2)]
    except RuntimeError as error:
        assert RACE in str(error)
        return events, True
    finally:
        device.wait_for_all()
    assert pair.launches.num_advances == kinds.count("c")
    return events, False


def test_every_event_is_needed(device):
    """The device refuses what races when an event is missing.

    The one that lets a step's memory be overwritten only after the kernel of the next step has read
    it is needed where a step that does not continue the last one overwrites it.
    """
    refused = []
    for kinds in ("fcccccccccc", "fcccccccff"):
        events, is_refused = run_ahead(device, kinds, -1)
        assert not is_refused
        # Those of the last three steps keep apart what would come behind them.
        before = [event for step, event in events if step < len(kinds) - 3]
        refused.append({(e, run_ahead(device, kinds, i)[1]) for i, e in enumerate(before)})
    needed = {("f0", True), *((f"c{i}", True) for i in (0, 1, 3))}
    assert refused[0] == needed | {("c2", False)}
    assert ("c2", True) in refused[1]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
