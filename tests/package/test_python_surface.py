# SPDX-License-Identifier: Apache-2.0
"""What Python users expect beside the methods: protocols, typed results, warnings, logs."""

from __future__ import annotations

import logging
import pickle
import threading

import numpy as np
import pytest
import tvm_ffi

import tir_kernels
import tvm_pagedkv as pkv
from tvm_pagedkv import transfer
from tvm_pagedkv.cache import CacheStats, GroupStats
from tvm_pagedkv.transfer import ChannelClosed, local_channels

from ..support.cases.caches.cache_cases import DIM, HEADS
from ..support.emulators.python_kernels import make_cache
from ..support.worlds.permissive_steps import permissive_step

QKV = np.ones((3, HEADS, DIM), "float32")


@pytest.fixture
def cache():
    cache = make_cache()
    for seq_id in (5, 7):
        cache.add_sequence(seq_id)
        with cache.forward([seq_id], [3]):
            for layer in range(2):
                cache.attention(layer, QKV)
    return cache


# --- protocols ----------------------------------------------------------------------------------


def test_a_cache_is_a_container_of_sequences(cache):
    assert len(cache) == 2
    assert 5 in cache and np.int64(7) in cache
    assert 6 not in cache and "5" not in cache and None not in cache
    cache.clear()
    assert len(cache) == 0 and 5 not in cache
    assert cache  # code that asks `if cache` means whether there is one


def test_a_cache_says_what_it_holds(cache):
    assert repr(cache) == "<KVCache: 2 layers, 2 sequences, 6 tokens, 2 of 16 pages in use>"
    with cache.forward([5], [3]):
        assert repr(cache).startswith("<KVCache: 2 layers, 2 sequences, ")
        for layer in range(2):
            cache.attention(layer, QKV)


def test_the_repr_of_a_busy_cache():
    """A debugger shows it while another thread is inside."""
    texts = []

    def kernel_of_another_thread(*_):
        thread = threading.Thread(target=lambda: texts.append(repr(cache)))
        thread.start()
        thread.join()

    cache = make_cache({"transpose_append": kernel_of_another_thread})
    cache.add_sequence(0)
    with cache.forward([0], [3]):
        for layer in range(2):
            cache.attention(layer, QKV)
    assert texts == ["<KVCache: 2 layers, in use by another thread>"] * 2


def test_stats_have_the_keys_of_their_type(cache):
    stats = cache.stats()
    assert stats.keys() == CacheStats.__required_keys__
    assert all(type(stats[name]) is int for name in stats.keys() - {"groups", "state_groups"})
    assert stats["state_groups"] == []  # without recurrent layers
    for group in stats["groups"]:
        assert group.keys() == GroupStats.__annotations__.keys()
        assert isinstance(group["kv_dtype"], str)
        assert all(type(group[name]) is int for name in group.keys() - {"kv_dtype"})


def test_a_channel_closes_at_the_end_of_with():
    one, other = local_channels()
    with one as entered:
        assert entered is one
        one.send({"type": "hello"})
    assert other.receive(0.0) == {"type": "hello"}
    with pytest.raises(ChannelClosed):
        other.receive(0.0)


# --- errors -------------------------------------------------------------------------------------


def test_a_full_cache_says_how_full(cache):
    cache.add_sequence(0)
    with permissive_step(cache, [0], [32]):  # 8 pages, the most that a step can take
        pass
    stats = cache.stats()
    with pytest.raises(pkv.CacheFullError) as caught:
        cache.begin_forward([0], [32])
    error = caught.value
    assert (error.needed, error.total) == (8, stats["num_pages"])
    assert error.available == stats["num_free_pages"] + stats["num_cached_pages"] == 6
    copy = pickle.loads(pickle.dumps(error))  # from a worker process, say
    assert (copy.needed, copy.available, copy.total) == (8, 6, error.total)


def test_counts_of_an_error_that_the_runtime_has_not_raised():
    error = pkv.CacheFullError("no room")
    assert (error.needed, error.available, error.total) == (None, None, None)
    assert str(error) == "no room"


def test_the_kernels_and_the_configuration_have_the_same_types():
    """Two tables, so that a configuration does not import TVM."""
    assert tir_kernels.spec.ITEMSIZE == pkv.config.ITEMSIZE


# --- names --------------------------------------------------------------------------------------


def test_what_is_true_of_an_object_is_an_attribute():
    """``cache.is_empty`` as ``ticket.is_done``: where one is called, the other is always true."""
    packages = (pkv, pkv.cache, transfer, pkv.stores, pkv.bundle, pkv.config)
    classes = {each for package in packages for each in vars(package).values()
               if isinstance(each, type)}  # fmt: skip
    assert {pkv.KVCache, transfer.Ticket} <= classes
    called = [
        f"{each.__name__}.{name}"
        for each in classes
        for name in set(dir(each)) - set(dir(tvm_ffi.Object))
        if name.startswith(("is_", "has_")) and callable(getattr(each, name))
    ]
    assert called == []


# --- logs ---------------------------------------------------------------------------------------


def test_compilation_is_logged(tmp_path, monkeypatch, caplog):
    import tir_kernels

    few = {"merge": tir_kernels.catalogue.KERNELS["merge"]}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path))
    config = pkv.KVCacheConfig(num_layers=1, num_qo_heads=4, num_kv_heads=2, qk_head_dim=8)
    caplog.set_level(logging.INFO, "tvm_pagedkv")
    for _ in range(2):  # the second one finds it on the disk
        pkv.build(config)
    lines = [record.getMessage() for record in caplog.records]
    assert [record.name for record in caplog.records] == ["tvm_pagedkv.compiler"] * 2
    assert lines[0].startswith("compiling 1 kernels: 4/2 heads of 8, float16")
    assert lines[1].startswith("compiled in ")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
