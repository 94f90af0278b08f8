# SPDX-License-Identifier: Apache-2.0
"""Memory for measurements that lies as page pools do: on huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import math
import mmap

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm

HUGE_PAGE_BYTES = 2**21


def _advised_memory(num_bytes: int) -> mmap.mmap | bytearray:
    """Zeros, for which huge pages were asked where that can be done."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(num_bytes)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: never huge
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def huge_zeros(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, tvm.runtime.Tensor]:
    """An array of zeros that begins at a huge page, and a tensor over the same memory.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        Of both; TVM and NumPy (with ml_dtypes) have to know it.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.frombuffer(_advised_memory(num_bytes + HUGE_PAGE_BYTES), np.uint8)
    start = -memory.__array_interface__["data"][0] % HUGE_PAGE_BYTES
    memory = memory[start : start + num_bytes]
    # As bytes: DLPack of NumPy has no bfloat16.
    tensor = tvm.runtime.from_dlpack(memory)._create_view(shape, dtype)
    return memory.view(dtype).reshape(shape), tensor
