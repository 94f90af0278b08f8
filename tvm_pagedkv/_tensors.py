# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensors of other libraries: views with strides, or copies to a device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

from ._bfloat16 import Bfloat16Array

DL_CPU = 1
# DLPack's id of the default stream, by device type: CUDA, ROCm.
_DEFAULT_STREAMS = {2: 1, 10: 0}


def as_tensor(name: str, value: Any, device: tvm_ffi.Device) -> tvm_ffi.Tensor:
    """View `value` as a tensor, or copy it to the cache's device.

    Parameters
    ----------
    name : str
        The argument's name in errors.
    value : tvm tensor, NumPy array, or object with ``__dlpack__``
        NumPy arrays are copied to `device`; others are viewed.
    device : tvm_ffi.Device

    Raises
    ------
    TypeError
        If `value` is not a tensor.
    """
    if isinstance(value, np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(value), device)
    if not isinstance(value, tvm_ffi.core.Tensor):
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        value = _imported(value)
    return value


def view(name: str, value: Any, *, is_written: bool = False) -> tvm_ffi.Tensor:
    """Return a tensor on the memory of `value`, with its strides.

    A read-only NumPy array is copied unless `is_written`, because DLPack cannot view it.

    Raises
    ------
    TypeError
        If `value` is not a tensor.
    ValueError
        If `is_written` and `value` is read-only.
    """
    if isinstance(value, tvm_ffi.core.Tensor):
        return value
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            if is_written:
                raise ValueError(f"{name} must be writable")
            value = value.copy()
        if value.dtype == ml_dtypes.bfloat16:  # which NumPy does not export through DLPack
            return tvm_ffi.from_dlpack(Bfloat16Array(name, value))
        return tvm_ffi.from_dlpack(value)
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return _imported(value)


def _imported(value: Any) -> tvm_ffi.Tensor:
    """View an object with DLPack; on a GPU the current stream waits for its pending writes.

    This is DLPack's stream protocol: the consumer names its stream, and the producer makes that
    stream wait for its own. The producer must wait for the consumer before it frees or overwrites
    the memory.
    """
    if hasattr(value, "detach"):  # torch: DLPack refuses tensors with a gradient
        value = value.detach()
    device_type, device_id = (int(number) for number in value.__dlpack_device__())
    if device_type not in _DEFAULT_STREAMS:
        return tvm_ffi.from_dlpack(value)
    device = tvm.runtime.device(device_type, device_id)
    stream = tvm_ffi.get_raw_stream(device) or _DEFAULT_STREAMS[device_type]
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer older than DLPack 1.0
        capsule = value.__dlpack__(stream=stream)
    return tvm_ffi.from_dlpack(capsule)
