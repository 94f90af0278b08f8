# SPDX-License-Identifier: Apache-2.0
"""`GgufFile`: the metadata of a GGUF file by key, and its tensors by name.

The header is parsed here rather than with ``gguf.GGUFReader``, which makes several objects for each
of the hundred thousand strings of a vocabulary and takes seconds for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .dequantize import block_sizes, dequantize

_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where a tensor lies: its shape with the last axis contiguous, its type, its first byte."""

    shape: tuple[int, ...]
    type_id: int
    begin: int


class GgufFile:
    """A GGUF file, which is mapped into memory.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    metadata : dict
        Values by key: bool, int, float, str, or a list of one of these.
    tensors : dict of str to TensorInfo

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not a complete GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # an empty file cannot be mapped
                raise ValueError(f"{self.path} is empty, not a GGUF file") from None
        try:
            self.metadata, self.tensors = _Header(self._bytes).read()
        except (struct.error, _Truncated):
            raise ValueError(f"{self.path} is cut off within its header") from None
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is not a readable GGUF file: {error}") from None

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Return a tensor as float32, or what it has at `index` of its first axis.

        Raises
        ------
        ValueError
            As `read_bytes`.
        """
        info, raw = self.tensors[name], self.read_bytes(name)
        shape = info.shape if index is None else info.shape[1:]
        return dequantize(raw if index is None else raw[index], info.type_id).reshape(shape)

    def read_bytes(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor: uint8, whose last axis has a row.

        Raises
        ------
        ValueError
            If its type is not supported, or the file ends before it does.
        """
        info = self.tensors[name]
        try:
            block, size = block_sizes(info.type_id)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name} {error}") from None
        columns = info.shape[-1]
        if columns % block:
            raise ValueError(
                f"{self.path}: tensor {name} has rows of {columns} elements; its type has blocks "
                f"of {block}"
            )
        count = math.prod(info.shape) // block * size
        if info.begin + count > len(self._bytes):
            raise ValueError(f"{self.path} is cut off within tensor {name}")
        raw = np.frombuffer(self._bytes, "u1", count, info.begin)
        return raw.reshape(*info.shape[:-1], columns // block * size)


class _Truncated(Exception):
    pass


class _Header:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"it begins with {self.data[:4]!r}, expected b'GGUF'")
        self.at = 4
        version = self.number("<I")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ValueError("it is big-endian, expected little-endian")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, expected 2 or 3")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            value = self.value(self.number("<I"), key)
            if repr(metadata.setdefault(key, value)) != repr(value):  # NaN is equal to itself here
                raise ValueError(f"it has the key {key} twice, with two values")
        infos, names = [], set()
        for _ in range(num_tensors):
            name = self.string()
            shape = tuple(self.number("<Q") for _ in range(self.number("<I")))[::-1]
            if not shape or 0 in shape:
                raise ValueError(f"tensor {name} has shape {list(shape)}")
            if name in names:
                raise ValueError(f"it has the tensor {name} twice")
            names.add(name)
            infos.append((name, shape, self.number("<I"), self.number("<Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment must be a positive integer, got {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors = {name: TensorInfo(shape, kind, base + at) for name, shape, kind, at in infos}
        return metadata, tensors

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise _Truncated
        return self.data[begin : self.at]

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner == _STRING:
                return [self.string() for _ in range(count)]
            return self.numbers(inner, count, key)
        return self.numbers(kind, 1, key)[0]

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{key} has values of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
