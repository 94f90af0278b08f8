# SPDX-License-Identifier: Apache-2.0
"""Matching of arrays that the caller owns, and loops over their rows."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ...layout import first_element
from ...spec import ITEMSIZE


def match(handle, shape: Sequence, dtype: str, strides: Sequence | None = None):
    """Match a tensor that may start at any element of its allocation."""
    align = ITEMSIZE.get(dtype, 4)
    return T.match_buffer(
        handle,
        shape,
        dtype,
        strides=strides,
        elem_offset=first_element(),
        align=align,
        offset_factor=1,
    )


def match_strided(handle, shape: Sequence, dtype: str):
    """Do what `match` does, with any strides but the last one: rows are contiguous."""
    outer = [T.int64() for _ in shape[:-1]]
    # The stride of an axis of one element may be anything, and does not matter.
    last = T.int64(1) if int(shape[-1]) > 1 else T.int64()
    return match(handle, [*shape[:-1], T.int64(int(shape[-1]))], dtype, [*outer, last])
