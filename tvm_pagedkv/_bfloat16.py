# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays of bfloat16 through DLPack, which NumPy itself does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_DL_CPU = 1
_DL_BFLOAT = 4


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
    ]


class Bfloat16Array:
    """A NumPy array as what `from_dlpack` takes."""

    _in_use: dict[int, tuple] = {}  # what the tensors made so far need, by address

    def __init__(self, name: str, array: np.ndarray):
        if any(stride % array.itemsize for stride in array.strides):
            raise ValueError(f"{name} must have strides of whole elements, got {array.strides}")
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        array = self.array
        dims = ctypes.c_int64 * max(array.ndim, 1)
        shape = dims(*array.shape)
        strides = dims(*(stride // array.itemsize for stride in array.strides))
        device = (ctypes.c_int32 * 2)(_DL_CPU, 0)
        tensor = _DLTensor(
            array.ctypes.data, device, array.ndim, _DL_BFLOAT, 16, 1, shape, strides, 0
        )
        managed = _DLManagedTensor(tensor, None, _release)
        address = ctypes.addressof(managed)
        self._in_use[address] = (managed, shape, strides, array)
        return _new_capsule(address, b"dltensor", None)


@_DELETER
def _release(address: int) -> None:
    Bfloat16Array._in_use.pop(address, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
