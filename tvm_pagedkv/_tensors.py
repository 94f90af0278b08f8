# SPDX-License-Identifier: Apache-2.0
"""Tensors of other libraries, viewed with their strides or copied to the cache's device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

from ._bfloat16 import Bfloat16Array

DL_CPU = 1


def as_tensor(name: str, value: Any, device: tvm_ffi.Device) -> tvm_ffi.Tensor:
    """View `value` as a tensor, or copy it to the cache's device.

    Parameters
    ----------
    name : str
        How messages call it.
    value : tvm tensor, NumPy array, or an object with DLPack
        NumPy arrays are copied (to `device`), others are viewed.
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
            value = value.detach()
        value = tvm_ffi.from_dlpack(value)
    return value


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
