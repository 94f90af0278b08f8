# SPDX-License-Identifier: Apache-2.0
"""Arguments of `page`: conversion to the tensors that kernels take, and errors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tir_kernels.cpu.page_ops.page_table import Finding
from tir_kernels.spec import FLOAT_DTYPES

from .. import _tensors

KV_LAYOUTS = ("NHD", "HND")
MLA_LAYOUT = "ND"
_INT32 = np.iinfo(np.int32)
_MAX_DIM = 1 << 16  # code of this length still compiles in seconds

_MESSAGES = {
    Finding.INDPTR_ORDER: (
        ValueError,
        "{indptr} must ascend from 0 or more, got {value} at index {index}",
    ),
    Finding.INDPTR_END: (
        ValueError,
        "{indptr}[{index}] must be at most {num_entries} (the size of {entries}), got {value}",
    ),
    Finding.LAST_PAGE_LEN: (
        ValueError,
        "kv_last_page_len[{index}] must be in [{minimum}, {page_size}], got {value}",
    ),
    Finding.BATCH_INDEX: (
        IndexError,
        "batch_indices[{index}] must be in [-1, {num_sequences}), got {value}",
    ),
    Finding.POSITION: (
        IndexError,
        "positions[{index}] must be in the pages of its sequence, got {value}",
    ),
    Finding.PAGE: (
        IndexError,
        "{indices}[{index}] must be a page of the pool (there are {num_pages}), got {value}",
    ),
    Finding.NO_PAGE: (ValueError, "sequence {index} has no page for its last position"),
    Finding.SEQ_LEN: (
        ValueError,
        "seq_lens[{index}] is {value}, less than the number of rows appended to it",
    ),
    Finding.KV_LEN: (
        ValueError,
        "kv_lens[{index}] must be in [0, positions of its blocks], got {value}",
    ),
    Finding.OUTPUT_ORDER: (
        ValueError,
        "vector_sparse_indptr must ascend from 0 or more, got {value} at index {index}",
    ),
    Finding.OUTPUT_END: (
        ValueError,
        "vector_sparse_indptr[{index}] is {value}, beyond the end of vector_sparse_offsets",
    ),
    Finding.OUTPUT_ROOM: (
        ValueError,
        "vector_sparse_indptr has room for {value} positions of sequence {index}, fewer than "
        "kv_lens has",
    ),
    Finding.OVERFLOW: (
        ValueError,
        "a number of sequence {index} must be below 2**31, got {value}",
    ),
}


def no_finding() -> np.ndarray:
    """Return the array to which a kernel writes its finding: kind, index, value."""
    return np.zeros(3, np.int64)


def raise_finding(found: np.ndarray, **context: Any) -> None:
    """Raise a kernel's finding, if it has one, with names and sizes from `context`."""
    if not found[0]:
        return
    error, message = _MESSAGES[Finding(int(found[0]))]
    names = {"indptr": "kv_indptr", "indices": "kv_indices", "entries": "kv_indices", "minimum": 0}
    names |= {"num_pages": "indices from 0", "num_entries": _INT32.max} | context
    raise error(message.format(index=int(found[1]), value=int(found[2]), **names))


def check_range(name: str, value: Any, minimum: int) -> None:
    """Check an integer argument; kernels multiply it as int64."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not minimum <= value <= _INT32.max:
        raise ValueError(f"{name} must be in [{minimum}, {_INT32.max}], got {value}")


def integers(name: str, value: Any, length: int | None = None) -> tvm_ffi.Tensor:
    """Return an int32 or int64 vector as int32, and check its length if one is given."""
    tensor, dtype = _vector(name, value, length)
    if dtype == "int32" and tensor.is_contiguous():
        return _with_strides(tensor)
    if dtype not in ("int32", "int64"):
        raise ValueError(f"{name} must be int32 or int64, got {dtype}")
    array = np.from_dlpack(tensor)
    if array.size and not _INT32.min <= array.min() <= array.max() <= _INT32.max:
        raise ValueError(f"{name} must fit in int32, got {array.min()} to {array.max()}")
    return _with_strides(tvm_ffi.from_dlpack(array.astype(np.int32, order="C")))


def integers_out(name: str, value: Any, length: int | None = None) -> tvm_ffi.Tensor:
    """A contiguous int32 vector on the memory of `value`, to be written."""
    tensor, dtype = _vector(name, value, length, is_written=True)
    if dtype != "int32" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32, got {dtype}")
    return _with_strides(tensor)


def empty_slots(count: int) -> tvm_ffi.Tensor:
    """Return the array to which a kernel writes the slots of `count` rows."""
    return tvm.runtime.empty((count, 2), "int32")


def _vector(
    name: str, value: Any, length: int | None, is_written: bool = False
) -> tuple[tvm_ffi.Tensor, str]:
    tensor = _on_cpu(name, value, is_written)
    shape = tensor.shape
    if len(shape) != 1 or (length is not None and shape[0] != length):
        wanted = "any" if length is None else length
        raise ValueError(f"{name} must have shape [{wanted}], got {list(shape)}")
    return tensor, str(tensor.dtype)


def _with_strides(vector: tvm_ffi.Tensor) -> tvm_ffi.Tensor:
    """NumPy gives empty vectors strides that kernels refuse."""
    return vector if vector.shape[0] else tvm.runtime.empty((0,), "int32")


def empty_like(example: Any, length: int) -> Any:
    """An int32 vector of the library of `example`."""
    if isinstance(example, np.ndarray):
        return np.empty(length, np.int32)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(example, torch.Tensor):
        return torch.empty(length, dtype=torch.int32)
    return tvm.runtime.empty((length,), "int32")


def rows(name: str, value: Any, is_written: bool = False) -> tvm_ffi.Tensor:
    """A tensor of float rows, each of them contiguous."""
    tensor = _on_cpu(name, value, is_written)
    shape, dtype = tensor.shape, str(tensor.dtype)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be {', '.join(FLOAT_DTYPES[:-1])} or bfloat16, got {dtype}")
    if len(shape) and shape[-1] > 1 and 0 not in shape and tensor.strides[-1] != 1:
        raise ValueError(
            f"{name} must have contiguous rows, got strides {list(tensor.strides)} of elements"
        )
    return tensor


@dataclass(frozen=True)
class Pools:
    """The checked pages of an append: one tensor of both planes, or one of each.

    Parameters
    ----------
    tensors : one tensor ``[P, 2, *page]``, or two ``[P, *page]``.
    axes : the layout of a page: "NHD", "HND" or "ND".
    """

    tensors: tuple[tvm_ffi.Tensor, ...]
    axes: str

    @classmethod
    def of(cls, pages: Any, layout: str) -> Pools:
        """Check the pages that an append is given."""
        if layout not in (*KV_LAYOUTS, MLA_LAYOUT):
            raise ValueError(f"kv_layout must be one of {', '.join(KV_LAYOUTS)}, got {layout!r}")
        names: tuple[str, ...]
        if layout == MLA_LAYOUT:
            names = ("ckv_cache", "kpe_cache")
        elif isinstance(pages, (tuple, list)):
            names = ("paged_kv_cache[0]", "paged_kv_cache[1]")
            if len(pages) != 2:
                raise ValueError(f"paged_kv_cache must be a tensor or a pair, got {len(pages)}")
        else:
            names, pages = ("paged_kv_cache",), (pages,)
        tensors = tuple(
            rows(name, value, is_written=True) for name, value in zip(names, pages, strict=True)
        )
        pools = cls(tensors, layout)
        for name, tensor in zip(names, tensors, strict=True):
            pools._check_shape(name, tensor)
        first = tensors[0]
        for name, tensor in zip(names[1:], tensors[1:], strict=True):
            if str(tensor.dtype) != pools.dtype:
                raise ValueError(f"{name} must be {pools.dtype} as {names[0]}, got {tensor.dtype}")
            if tuple(tensor.shape)[:-1] != tuple(first.shape)[:-1]:
                raise ValueError(
                    f"{name} must have shape {[*first.shape[:-1], 'any']} as {names[0]}, got "
                    f"{list(tensor.shape)}"
                )
        return pools

    def _check_shape(self, name: str, tensor: tvm_ffi.Tensor) -> None:
        axis_names = {"N": "page_size", "H": "heads", "D": "dim"}
        wanted = ["pages", *["2"] * self.is_fused, *(axis_names[axis] for axis in self.axes)]
        shape = list(tensor.shape)
        if len(shape) != len(wanted) or (self.is_fused and shape[1] != 2):
            raise ValueError(f"{name} must have shape [{', '.join(wanted)}], got {shape}")
        if 0 in shape[1:] or max(shape[:-1]) > _INT32.max or shape[-1] > _MAX_DIM:
            raise ValueError(f"{name} must have axes of 1 to {_INT32.max}, got {shape}")
        repeats = (n > 1 and stride == 0 for n, stride in zip(shape, tensor.strides, strict=True))
        if 0 not in shape and any(repeats):
            raise ValueError(f"{name} must not hold an element twice, got {list(tensor.strides)}")

    @property
    def is_fused(self) -> bool:
        return len(self.tensors) == 1

    @property
    def dtype(self) -> str:
        return str(self.tensors[0].dtype)

    @property
    def num_pages(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def page_size(self) -> int:
        return self._axis("N")

    def _axis(self, axis: str) -> int:
        return self.tensors[0].shape[1 + self.is_fused + self.axes.index(axis)]

    def rows_for(self, values: Mapping[str, Any]) -> list[tvm_ffi.Tensor]:
        """Check the rows that go to the two planes; `values` are their names and tensors."""
        sources = [rows(name, value) for name, value in values.items()]
        count = sources[0].shape[0] if len(sources[0].shape) else 0
        heads = [self._axis("H")] if "H" in self.axes else []
        for i, (name, source) in enumerate(zip(values, sources, strict=True)):
            wanted = [count, *heads, self.tensors[i * (not self.is_fused)].shape[-1]]
            if list(source.shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}, got {list(source.shape)}")
            if str(source.dtype) != str(sources[0].dtype):
                raise ValueError(
                    f"{name} must be {sources[0].dtype} as {next(iter(values))}, got {source.dtype}"
                )
        return sources


def _on_cpu(name: str, value: Any, is_written: bool = False) -> tvm_ffi.Tensor:
    tensor = _tensors.view(name, value, is_written=is_written)
    if tensor.device.dlpack_device_type() != _tensors.DL_CPU:
        raise ValueError(f"{name} on {tensor.device}: these functions run on CPUs")
    return tensor
