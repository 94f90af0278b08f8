# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of kernels for GPUs, which the cache owns, on the emulated device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ..support.cases.caches.cache_cases import PlainPair
from ..support.emulators.cuda_emulator import capturing, multiprocessors, take_num_pool_blocks
from .test_cuda_layers import make_cache


@pytest.fixture
def pair(device):
    """A cache on a device on which decode is split, and its reference."""
    with multiprocessors(3):
        pair = PlainPair(make_cache(device, [pkv.LayerSpec("mha")] * 2, dtype="float16"), "normal")
        take_num_pool_blocks()
        yield pair


def test_a_cache_lends_and_counts_it(pair):
    before = pair.cache.stats()
    assert before["scratch_bytes"] == 0
    pair.add(0, 1)
    pair.step([0, 1], [30, 9])
    pair.step([0, 1], [1, 1])
    after = pair.cache.stats()
    assert after["scratch_bytes"] > 0
    assert after["allocated_bytes"] == before["allocated_bytes"] + after["scratch_bytes"]
    for _ in range(3):
        pair.step([1, 0], [1, 1])
    assert pair.cache.stats()["scratch_bytes"] == after["scratch_bytes"]
    assert take_num_pool_blocks() == 0
    pair.check_rows()


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_nothing_is_allocated_while_a_graph_is_captured(pair, is_warm):
    """A cache without enough memory lends none: the graph has a block of the pool."""
    pair.add(0)
    with contextlib.nullcontext() if is_warm else capturing():
        pair.step([0], [30])
        pair.step([0], [1])
    before = pair.cache.stats()["scratch_bytes"]
    assert (before > 0) == is_warm
    take_num_pool_blocks()
    with capturing():
        pair.step([0], [1])
    assert pair.cache.stats()["scratch_bytes"] == before
    assert (take_num_pool_blocks() == 0) == is_warm


@pytest.mark.parametrize("num_bytes", [-1, 0, 1 << 20, 2**63 - 1])
def test_nothing_is_lent_outside_calls_of_layers(pair, num_bytes):
    borrow, give_back = (
        tvm_ffi.get_global_func(f"pagedkv.{name}_scratch") for name in ("borrow", "return")
    )
    pair.add(0)
    pair.step([0], [30])
    before = pair.cache.stats()["scratch_bytes"]
    for device_id in (0, 1, -1):
        assert borrow(device_id, num_bytes, True).value is None
    assert not give_back(None)
    with pytest.raises(TypeError):
        give_back(np.zeros(1))
    assert pair.cache.stats()["scratch_bytes"] == before


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
