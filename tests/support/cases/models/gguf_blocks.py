# SPDX-License-Identifier: Apache-2.0
"""Matrices as blocks of every type of tensor of GGUF files."""

from __future__ import annotations

import gguf
import numpy as np

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
# Types that the package gguf cannot write -> where a block has its float16 scales.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


class Blocks:
    """Writes and reads matrices of one type.

    Parameters
    ----------
    name : str
    seed : int
        For the types that are not written: their blocks are random bytes, with scales that give the
        numbers the standard deviation of the matrix.
    """

    def __init__(self, name: str, seed: int):
        self.name, self.kind = name, gguf.GGMLQuantizationType[name]
        self._random = np.random.default_rng(seed)
        if name in _SCALES:
            print("seed", seed)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return rows of bytes for float32 ``[rows, columns]``."""
        if self.name not in _SCALES:
            return gguf.quants.quantize(np.ascontiguousarray(values), self.kind)
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        shape = (values.shape[0], values.shape[1] // block)
        raw = self._random.integers(0, 256, (*shape, size), dtype="u1")
        self._set_scales(raw, 1.0)
        spread = self.decode(raw.reshape(shape[0], -1)).std()
        self._set_scales(raw, values.std() / spread)
        return raw.reshape(shape[0], -1)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Return the float32 numbers, as the package gguf of the ggml project reads them."""
        return gguf.quants.dequantize(raw, self.kind)

    def _set_scales(self, raw: np.ndarray, scale: float) -> None:
        for position in _SCALES[self.name]:
            raw[..., position : position + 2] = np.frombuffer(np.float16(scale).tobytes(), "u1")
