# SPDX-License-Identifier: Apache-2.0
"""Arrays on huge pages, where the system has them, as page pools are."""

from __future__ import annotations

import contextlib
import math
import mmap

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm

HUGE_PAGE_BYTES = 2**21


def _advised_memory(num_bytes: int) -> mmap.mmap | bytearray:
    """Return zeroed memory, on huge pages if the system grants them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(num_bytes)
    # MAP_PRIVATE, because shared memory never gets huge pages.
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def huge_zeros(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, tvm.runtime.Tensor]:
    """Return a zeroed array that begins at a huge page, and a tensor on the same memory.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        A type that both TVM and NumPy (with ml_dtypes) know.

    Returns
    -------
    array : numpy.ndarray of `shape` and `dtype`
    tensor : tvm.runtime.Tensor of `shape` and `dtype`
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.frombuffer(_advised_memory(num_bytes + HUGE_PAGE_BYTES), np.uint8)
    start = -memory.__array_interface__["data"][0] % HUGE_PAGE_BYTES
    memory = memory[start : start + num_bytes]
    # As bytes, because NumPy does not export bfloat16 through DLPack.
    tensor = tvm.runtime.from_dlpack(memory)._create_view(shape, dtype)
    return memory.view(dtype).reshape(shape), tensor
