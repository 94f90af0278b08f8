# SPDX-License-Identifier: Apache-2.0
"""Matching of array arguments: `T.match_buffer` with alignments and offsets.

The TVMScript parser evaluates every expression in a kernel by itself, which takes about 0.1 ms.
What is done in these functions costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import F32, I32, aligned
from ..layout import match_pages
from ..spec import KernelSpec


def sizes(count: int) -> list:
    """Sizes that a call decides: int32 variables, which the parser names."""
    return [T.int32() for _ in range(count)]


def match_int32(handle, *shape):
    """Match an int32 array, which may start at any element; None if the kernel has no such one."""
    if handle is None:
        return None
    return T.match_buffer(handle, shape, elem_offset=T.int32(), **I32)


def match_float32(handle, *shape):
    """Match a float32 array, which may start at any element; None if the kernel has no such one."""
    if handle is None:
        return None
    return T.match_buffer(handle, shape, elem_offset=T.int64(), **F32)


def row_matcher(spec: KernelSpec, dtype: str | None = None) -> Callable:
    """``(handle, *shape) -> Buffer`` for arrays of rows of a type, `spec.dtype` unless given."""
    options = aligned(spec, dtype or spec.dtype)

    def match_rows(handle, *shape):
        return T.match_buffer(handle, shape, elem_offset=T.int64(), **options)

    return match_rows


def page_matcher(spec: KernelSpec) -> Callable:
    """``(handle, num_pages) -> Buffer`` for the pool of a layer."""
    return lambda handle, num_pages: match_pages(handle, num_pages, spec)
