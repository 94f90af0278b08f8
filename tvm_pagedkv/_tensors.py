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
# What DLPack calls the default stream, by device type: CUDA, ROCm.
_DEFAULT_STREAMS = {2: 1, 10: 0}


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
        value = _imported(value)
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
    return _imported(value)


def _imported(value: Any) -> tvm_ffi.Tensor:
    """View an object with DLPack; on a GPU the current stream waits for what still writes it.

    That is DLPack's protocol for streams: the producer is told the consumer's stream, and orders it
    after its own. What frees or overwrites the memory later must wait for the consumer by itself.
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
    except TypeError:  # a producer from before DLPack 1.0
        capsule = value.__dlpack__(stream=stream)
    return tvm_ffi.from_dlpack(capsule)
