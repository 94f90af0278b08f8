# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: the named tensors of a Hugging Face directory, read one at a time."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors relies on
import numpy as np
from safetensors import SafetensorError, safe_open

from .config import read_json
from .weight_formats import QuantizedRows

_FLOATS = ("float32", "float16", "bfloat16", "float64")


class Checkpoint:
    """The ``*.safetensors`` of a directory: one file, or shards with an index.

    Parameters
    ----------
    directory : Path
        The model's directory.

    Raises
    ------
    FileNotFoundError
        If the tensors, or a shard that the index names, are missing.
    ValueError
        If a file is damaged.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory)
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = _shards(index)
        else:
            files = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{self.path} has no tensors; expected model.safetensors, or "
                "model.safetensors.index.json and its shards"
            )
        missing = [file for file in files if not (self.path / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.path} lacks {len(missing)} of the {len(files)} files that its index "
                f"names: {', '.join(missing)}"
            )
        self._readers = {}
        for file in files:
            reader = _open(self.path / file)
            self._readers.update(dict.fromkeys(reader.keys(), reader))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._readers]

    def format(self, name: str) -> None:
        """Return None: tensors are not quantized."""

    def read_quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedRows:
        """Raise a NotImplementedError: no tensor has a `WeightFormat`."""
        raise NotImplementedError(f"{self.path} has no quantized tensor {name}")

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor in its stored dtype.

        Raises
        ------
        ValueError
            If it is missing, has another shape, or is not of a floating-point type.
        """
        if name not in self._readers:
            raise ValueError(f"{self.path} lacks tensor {name}; expected shape {list(shape)}")
        reader = self._readers[name]
        found = tuple(reader.get_slice(name).get_shape())
        if found != tuple(shape):
            raise ValueError(
                f"{self.path}: tensor {name} has shape {list(found)}; expected {list(shape)}"
            )
        tensor = reader.get_tensor(name)
        if str(tensor.dtype) not in _FLOATS:
            raise ValueError(
                f"{self.path}: tensor {name} has type {tensor.dtype}; expected one of "
                f"{', '.join(_FLOATS)}"
            )
        return tensor


def _shards(index: Path) -> list[str]:
    """Return the file names in an index, which must be in the same folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: tensor {name} is in {file!r}; expected the name of a file")
    return sorted(set(weight_map.values()))


def _open(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None
