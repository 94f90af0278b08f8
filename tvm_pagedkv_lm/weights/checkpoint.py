# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: the named tensors of a Hugging Face directory, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors relies on
import numpy as np
from safetensors import SafetensorError, safe_open

from ..config.json_files import check_content
from ..formats.mxfp4 import check_scales, unpack_blocks
from ..formats.weight_formats import GROUP, MXFP4, QuantizedRows, WeightFormat
from .weight_files import weight_files, why_no_weights

_CODES, _SCALES = "_blocks", "_scales"  # endings of the names of the tensors of one of mxfp4
_FLOATS = ("float32", "float16", "bfloat16", "float64")


class Checkpoint:
    """The tensors in the `weight_files` of a directory.

    Parameters
    ----------
    directory : Path
        The model's directory.

    Raises
    ------
    FileNotFoundError
        If there are no weights, or one of their files is missing.
    ValueError
        If a file is damaged, or two files have different tensors of the same name.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory)
        files = weight_files(self.path)
        if not files:
            raise FileNotFoundError(why_no_weights(self.path))
        missing = [file for file in files if not (self.path / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.path} lacks {len(missing)} of the {len(files)} files that have its "
                f"weights: {', '.join(missing)}"
            )
        self._readers: dict[str, Any] = {}
        for file in files:
            reader = _open(self.path / file)
            names = reader.keys()
            for name in names:
                if name in self._readers and not _is_same(self._readers[name], reader, name):
                    raise ValueError(
                        f"{self.path}: tensor {name} of {file} has other values in another file"
                    )
                self._readers[name] = reader

    def names(self) -> list[str]:
        """Return the names of all tensors; codes and scales of mxfp4 are one tensor."""
        return [
            name.removesuffix(_CODES)
            for name in self._readers
            if not (name.endswith(_SCALES) and self._is_mxfp4(name.removesuffix(_SCALES)))
        ]

    def format(self, name: str) -> WeightFormat | None:
        """Return the format of a tensor that is quantized."""
        return MXFP4 if self._is_mxfp4(name) else None

    def _is_mxfp4(self, name: str) -> bool:
        return name + _CODES in self._readers and name + _SCALES in self._readers

    def read(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Return a tensor in its stored dtype, or as float32 if it is quantized.

        Parameters
        ----------
        shape : tuple of int
        expert : (int, int), optional
            Which of how many tensors of this shape is read.

        Raises
        ------
        ValueError
            If it is missing, has another shape, or is not of a floating-point type.
        """
        if self._is_mxfp4(name):
            return self.read_quantized(name, shape, expert).values()
        return self._read(name, shape, expert, _FLOATS)

    def read_quantized(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> QuantizedRows:
        """Return a tensor with the codes of the checkpoint, if it has a `format`.

        Raises
        ------
        ValueError
            As `read`, or if a scale is not a number.
        """
        rows, columns = shape
        groups = rows, columns // GROUP
        blocks = self._read(name + _CODES, (*groups, GROUP // 2), expert, ("uint8",))
        scales = self._read(name + _SCALES, groups, expert, ("uint8",))
        try:
            check_scales(scales)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name} {error}") from None
        return QuantizedRows(MXFP4, unpack_blocks(blocks).reshape(shape), scales)

    def _read(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None, types
    ) -> np.ndarray:
        if name not in self._readers:
            raise ValueError(f"{self.path} lacks tensor {name}; expected shape {list(shape)}")
        stored = self._readers[name].get_slice(name)
        expected = shape if expert is None else (expert[1], *shape)
        found = tuple(stored.get_shape())
        if found != tuple(expected):
            raise ValueError(
                f"{self.path}: tensor {name} has shape {list(found)}; expected {list(expected)}"
            )
        reader = self._readers[name]
        tensor = reader.get_tensor(name) if expert is None else stored[expert[0]]
        if str(tensor.dtype) not in types:
            raise ValueError(
                f"{self.path}: tensor {name} has type {tensor.dtype}; expected one of "
                f"{', '.join(types)}"
            )
        return tensor


def _is_same(one: Any, other: Any, name: str) -> bool:
    """Return whether two files have the same tensor of a name."""
    here, there = one.get_tensor(name), other.get_tensor(name)
    is_alike = here.dtype == there.dtype and here.shape == there.shape
    return is_alike and here.tobytes() == there.tobytes()


def _open(file: Path) -> Any:
    check_content(file)
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None
