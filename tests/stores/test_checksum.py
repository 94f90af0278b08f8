# SPDX-License-Identifier: Apache-2.0
"""The checksum of values: each bit counts, and what is no memory of bytes is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv  # noqa: F401  (registers the function)


def checksum(data: np.ndarray, seed: int = 0) -> int:
    return tvm_ffi.get_global_func("pagedkv.checksum")(tvm_ffi.from_dlpack(data), seed)


@pytest.mark.parametrize("size", [1, 7, 64, 300, 5000])
def test_each_bit_and_the_seed_count(size):
    data = np.arange(size, dtype=np.uint8)
    sums = {checksum(data), checksum(data, 1), checksum(data, -1)}
    for bit in range(8 * size):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 3 + 8 * size
    assert checksum(data) == checksum(data.copy())


def test_known_values():
    """Files outlive versions: the sums are those of XXH3 with 64 bits."""
    assert checksum(np.frombuffer(bytearray(b"abc"), np.uint8)) == 0x78AF5F94892F3950
    assert checksum(np.empty(0, np.uint8)) == 0x2D06800538D394C2


def test_views_begin_where_they_say():
    data = np.arange(100, dtype=np.uint8)
    assert checksum(data[10:90]) == checksum(data[10:90].copy())


@pytest.mark.parametrize("data", [np.zeros(8, np.int8), np.zeros((4, 4), np.uint8)[:, :2]])
def test_other_memory_is_refused(data):
    with pytest.raises(ValueError, match="contiguous bytes in host memory"):
        checksum(data)


def test_nothing_is_refused():
    with pytest.raises(TypeError):
        tvm_ffi.get_global_func("pagedkv.checksum")(None, 0)


if __name__ == "__main__":
    tvm.testing.main()
