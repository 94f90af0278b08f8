# SPDX-License-Identifier: Apache-2.0
"""Match the arguments that the attention kernels share, with no more alignment than is certain."""

from __future__ import annotations

from tvm.script import tirx as T

from ..layout import pages_shape
from ..spec import ITEMSIZE, KernelSpec


def index_array(handle, *shape):
    """An int32 array that may start at any element of a larger one."""
    offset = T.int32()
    return T.match_buffer(handle, shape, "int32", elem_offset=offset, offset_factor=1, align=4)


def rows_array(handle, shape, dtype: str):
    """A dense array of rows that may start at any element of a larger one."""
    offset = T.int64()
    return T.match_buffer(
        handle, shape, dtype, elem_offset=offset, offset_factor=1, align=ITEMSIZE[dtype]
    )


def page_pool(handle, spec: KernelSpec):
    """The pages of a layer, which may start at any element of a larger array."""
    num_pages, offset = T.int32(), T.int64()
    return T.match_buffer(
        handle,
        pages_shape(num_pages, spec),
        spec.kv_dtype,
        elem_offset=offset,
        offset_factor=1,
        align=ITEMSIZE[spec.kv_dtype],
    )


def require_half_conversion(spec: KernelSpec, *dtypes: str) -> None:
    """Refuse float16 where every element would be a library call."""
    if "float16" in dtypes and not spec.target.has_f16_convert:
        raise ValueError(
            "float16 needs a CPU target that converts float16 in hardware (F16C, AVX-512F or "
            f"AArch64), got dtype={spec.dtype}, kv_dtype={spec.kv_dtype}, has_f16_convert=False"
        )
