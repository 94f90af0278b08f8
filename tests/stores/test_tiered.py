# SPDX-License-Identifier: Apache-2.0
"""`TieredStore`: where values are found, and where they are put."""

from __future__ import annotations

import hashlib

import pytest

from tvm_pagedkv.stores import TieredStore

from ..support.cases.caches.store_cases import get, key_of, put, value_of
from ..support.emulators.store_memory import MemoryStore

SIZE = 5000
KEYS = [key_of(i) for i in range(6)]
SIZES = [SIZE] * 6


class Broken(MemoryStore):
    def _fail(self, *_):
        raise OSError("gone")

    exists = get_into = put_from = close = _fail


def filled(*indices):
    store = MemoryStore()
    store.values = {KEYS[i]: value_of(KEYS[i], SIZE).tobytes() for i in indices}
    return store


def test_what_is_far_is_copied_up():
    near, middle, far = filled(0), filled(1), filled(0, 1, 2, 3)
    store = TieredStore([near, middle, far])
    assert store.exists(KEYS) == [True] * 4 + [False] * 2
    assert near.values.keys() == {KEYS[0]}  # asking copies nothing
    assert get(store, KEYS, SIZES) == [True] * 4 + [False] * 2
    assert near.values == {key: far.values[key] for key in KEYS[:4]}
    assert middle.values.keys() == set(KEYS[1:4])


@pytest.mark.parametrize("policy", ["all", "first"])
def test_puts_go_where_the_policy_says(policy):
    near, far = MemoryStore(), MemoryStore()
    assert all(put(TieredStore([near, far], put=policy), KEYS, SIZES))
    assert near.values.keys() == set(KEYS)
    assert far.values.keys() == (set(KEYS) if policy == "all" else set())


@pytest.mark.parametrize("position", [0, 1])
def test_a_store_that_raises_is_skipped(position):
    good = MemoryStore()
    stores = [good, good]
    stores[position] = Broken()
    store = TieredStore(stores)
    assert all(put(store, KEYS, SIZES)) and all(store.exists(KEYS)) and all(get(store, KEYS, SIZES))
    store.close()
    assert good.is_closed
    assert not any(put(TieredStore([Broken()]), KEYS, SIZES))


def test_a_wrong_value_is_a_miss_and_stays_where_it_is():
    """With `verify`, values of a store that is wrong are asked of the next one."""
    near, wrong, far = MemoryStore(), filled(0, 1, 2), filled(0, 1)
    wrong.values[KEYS[0]] = bytes(SIZE)
    wrong.values[KEYS[2]] = bytes(SIZE)
    right = {key: hashlib.sha256(value_of(key, SIZE)).digest() for key in KEYS}
    store = TieredStore(
        [near, wrong, far], verify=lambda key, value: hashlib.sha256(value).digest() == right[key]
    )
    assert get(store, KEYS, SIZES) == [True, True] + [False] * 4
    assert near.values == far.values
    assert wrong.values[KEYS[0]] == far.values[KEYS[0]]  # and what is right takes its place


def test_memory_is_registered_everywhere():
    stores = [MemoryStore(), MemoryStore()]
    TieredStore(stores).register(4096, 100)
    assert [store.registered for store in stores] == [[(4096, 100)]] * 2


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="at least one store"):
        TieredStore([])
    with pytest.raises(ValueError, match="put must be one of all, first"):
        TieredStore([MemoryStore()], put="last")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
