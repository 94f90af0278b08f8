# SPDX-License-Identifier: Apache-2.0
"""Tensors of other libraries: contiguous ones on the cache's device, or views with strides."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

from ._bfloat16 import Bfloat16Array

DL_CPU = 1


def as_tensor(name: str, value: Any, device: tvm_ffi.Device) -> tvm_ffi.Tensor:
    """View or copy `value` as a contiguous tensor.

    Parameters
    ----------
    name : str
        How messages call it.
    value : tvm tensor, NumPy array, or an object with DLPack
        NumPy arrays are copied (to `device`), others are viewed where they are contiguous.
    device : tvm_ffi.Device

    Raises
    ------
    TypeError
        When `value` is no tensor.
    """
    if isinstance(value, np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(value), device)
    if not isinstance(value, tvm_ffi.core.Tensor):
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if hasattr(value, "detach"):  # torch: DLPack refuses tensors with a gradient
            value = value.detach().contiguous()
        value = tvm_ffi.from_dlpack(value)
    return value if value.is_contiguous() else _compact(name, value)


def view(name: str, value: Any, *, is_written: bool = False) -> tvm_ffi.Tensor:
    """A tensor on the memory of `value`, with its strides.

    What is only read may be a copy, where there is no other way to it.

    Raises
    ------
    TypeError
        When `value` is no tensor.
    ValueError
        When it is to be written and must not be.
    """
    if isinstance(value, tvm_ffi.core.Tensor):
        return value
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            if is_written:
                raise ValueError(f"{name} must be writeable")
            value = value.copy()
        if value.dtype == ml_dtypes.bfloat16:  # NumPy takes none through DLPack
            return tvm_ffi.from_dlpack(Bfloat16Array(name, value))
        return tvm_ffi.from_dlpack(value)
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if hasattr(value, "detach"):  # torch: DLPack refuses tensors with a gradient
        value = value.detach()
    return tvm_ffi.from_dlpack(value)


def _compact(name: str, tensor: tvm_ffi.Tensor) -> tvm_ffi.Tensor:
    if tensor.device.dlpack_device_type() != DL_CPU:
        raise ValueError(f"{name} must be contiguous: strided tensors are copied on a CPU only")
    # By hand, because NumPy takes no bfloat16 through DLPack.
    item_bytes = tvm_ffi.dtype(tensor.dtype).itemsize
    strides = [stride * item_bytes for stride in tensor.strides]
    extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    raw = (ctypes.c_char * (extent + item_bytes)).from_address(tensor.data_ptr())
    view = np.ndarray(tensor.shape, f"u{item_bytes}", buffer=raw, strides=strides)
    compact = tvm.runtime.empty(tensor.shape, str(tensor.dtype))
    bits = np.ascontiguousarray(view)
    ctypes.memmove(compact.data_ptr(), bits.ctypes.data, bits.nbytes)
    return compact
