# SPDX-License-Identifier: Apache-2.0
"""Pages of a device go to host memory and come back; steps that save pages do not stop the host.

The device is emulated; the kernels are in NumPy, launched on it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv

from ..support.cases.caches.cache_cases import DIM, HEADS, NUM_QO_HEADS, layer_of
from ..support.emulators.dict_store import DictStore
from ..support.emulators.python_kernels import KERNELS, LAYER, make_cache
from ..support.harness.host_memory import flip_bit_of

FIELDS = {"page_size": 4, "max_total_tokens": 64, "max_num_sequences": 2}


class Texts:
    """A cache on the device whose rows are random, and host memory below it."""

    def __init__(self, device, **tiers):
        self.device, self.rng = device, np.random.default_rng(0)
        fields = {**FIELDS, "layers": [LAYER, layer_of(6)]}
        self.cache = make_cache([device.kernels(KERNELS)], device=device.device, **fields)
        if tiers:
            config = pkv.PrefixCacheConfig(**{"host_bytes": 1 << 20, **tiers})
            pkv.open_prefix_cache(self.cache, config)

    def append(self, seq_id: int, tokens: list[int]) -> None:
        rows = self.rng.standard_normal((len(tokens), HEADS, DIM)).astype("float32")
        qkv = self.device.put(rows)
        o = tvm.runtime.empty((len(tokens), NUM_QO_HEADS, DIM), "float32", self.device.device)
        with self.cache.forward([seq_id], [len(tokens)], tokens=tokens):
            for layer in range(2):
                self.cache.attention(layer, qkv, out=o)

    def run(self, tokens: list[int]) -> None:
        self.cache.add_sequence(0)
        for begin in range(0, len(tokens), 8):
            self.append(0, tokens[begin : begin + 8])

    def fill(self) -> None:
        """Other texts take all pages."""
        for begin in range(100, 400, 60):
            self.run(list(range(begin, begin + 60)))
            self.cache.remove_sequence(0)


def rows_of(cache, seq_id: int, end: int) -> list[np.ndarray]:
    begin = cache.first_position(seq_id, 1)
    return [x.numpy() for x in cache.debug_get_kv(seq_id, begin, end)]


@pytest.mark.parametrize("write", ["back", "through", "selective"])
@pytest.mark.parametrize("is_other", [False, True], ids=["default stream", "other stream"])
def test_rows_come_back_bit_for_bit(device, write, is_other):
    texts = Texts(device, write_policy=write)
    stream = device.device.create_raw_stream() if is_other else None
    prompt = list(range(24))
    if stream is not None:
        with tvm_ffi.use_raw_stream(device.device, stream):
            texts.run(prompt)
    else:
        texts.run(prompt)
    expected = rows_of(texts.cache, 0, 24)
    texts.cache.remove_sequence(0)
    texts.cache.add_sequence(1, [*prompt, 1])  # a hit, for "selective"
    texts.cache.remove_sequence(1)
    texts.fill()
    assert texts.cache.add_sequence(1, [*prompt, 1]) == 24
    texts.cache.check_integrity()
    assert texts.cache.stats()["prefix_tiers"]["reused_host_tokens"] == 24
    # Rows before the window of the next row came back with its first page.
    actual = rows_of(texts.cache, 1, 24)
    for got, want in zip(actual, expected, strict=True):
        count = min(got.shape[1], want.shape[1])
        np.testing.assert_array_equal(got[:, -count:], want[:, -count:])


def test_damaged_host_memory_is_a_miss(device):
    texts = Texts(device, write_policy="through")
    prompt = list(range(24))
    texts.run(prompt)
    expected = rows_of(texts.cache, 0, 8)
    row = texts.cache.debug_get_kv(0, 9, 10)[0].numpy()[0, 0, 0].tobytes()  # on page 2 of 6
    texts.cache.remove_sequence(0)
    texts.fill()
    texts.cache.match_prefix([0])  # until then, copies are on their way
    flip_bit_of(texts.cache, row)
    assert texts.cache.add_sequence(1, [*prompt, 1]) == 8
    assert texts.cache.stats()["prefix_tiers"]["num_damaged_pages"] == 2  # of both layer groups
    for got, want in zip(rows_of(texts.cache, 1, 8), expected, strict=True):
        count = min(got.shape[1], want.shape[1])
        np.testing.assert_array_equal(got[:, -count:], want[:, -count:])
    texts.cache.check_integrity()


@pytest.mark.parametrize("write", ["back", "through"])
def test_steps_that_save_pages_do_not_stop_the_host(device, write):
    num_stops = []
    for texts in (Texts(device), Texts(device, write_policy=write)):
        texts.fill()
        before = texts.cache.stats()["num_reclaimed_pages"]
        with device.counted() as calls:
            texts.fill()
        assert texts.cache.stats()["num_reclaimed_pages"] > before + 20
        num_stops.append(calls["stops"])
    assert num_stops[0] == num_stops[1]
    texts.cache.match_prefix([0])
    assert texts.cache.stats()["prefix_tiers"]["num_host_pages"] > 20


def test_a_cache_that_dies_writes_what_is_queued(device):
    store = DictStore()
    texts = Texts(device, store=store, model_id="m")
    texts.run(list(range(24)))
    del texts
    assert store.closed.wait(60)
    assert len(store.values) == 2 * 6


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
