# SPDX-License-Identifier: Apache-2.0
"""`CodeMatrix`: the packed layout of quantized weights.

A block of output features is stored group by group: the codes of `GROUP` input features, then the
scales of the block's output features, then their minima. So a kernel reads a block once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tir_kernels.spec import VectorTarget

from ...formats.weight_formats import GROUP, QuantizedRows, WeightFormat
from .output_blocks import OutputBlocks


@dataclass(frozen=True)
class CodeMatrix(OutputBlocks):
    """The packed layout of a quantized matrix for a target: uint8 ``[blocks, groups, bytes]``.

    Parameters
    ----------
    out_features, in_features : int
        `in_features` is a multiple of `GROUP`.
    format : WeightFormat
    target : VectorTarget
    """

    out_features: int
    in_features: int
    format: WeightFormat
    target: VectorTarget
    dtype = "uint8"  # of the packed weights

    @property
    def multiplies_bytes(self) -> bool:
        """Whether kernels multiply codes as bytes."""
        return self.target.has_vnni and self.target.lanes == 16

    @property
    def multiplies_words(self) -> bool:
        """Whether kernels multiply codes as integers of 16 bits."""
        return self.target.has_word_dot

    @property
    def multiplies_codes(self) -> bool:
        """Whether kernels multiply codes; otherwise they are converted to float32."""
        return self.multiplies_bytes or self.multiplies_words

    @property
    def interleaved(self) -> int:
        """Input features of an output feature that lie side by side: a dword of codes."""
        return 4 if self.multiplies_codes else 1

    @property
    def num_groups(self) -> int:
        """Groups of an output feature."""
        return self.in_features // GROUP

    @property
    def scale_dtype(self) -> str:
        """Type of scales and minima: float16 where the CPU converts it, or that of mxfp4."""
        if self.format.is_mxfp4:
            return "uint8"
        return "float16" if self.target.has_f16_convert else "float32"

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a group of a block."""
        return self.width * np.dtype(self.scale_dtype).itemsize

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a group of a block."""
        return GROUP * self.width * self.format.bits // 8

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the packed weights."""
        scales = 1 + self.format.has_minima
        return self.num_blocks, self.num_groups, self.code_bytes + scales * self.scale_bytes

    def pack(self, weight: QuantizedRows) -> np.ndarray:
        """Pack a matrix, which is of this format."""
        padding = self.num_blocks * self.width - self.out_features
        blocks = [
            np.pad(array, ((0, padding), (0, 0))).reshape(self.num_blocks, self.width, -1)
            for array in weight.arrays()
        ]
        codes = blocks[0].reshape(self.num_blocks, self.width, self.num_groups, GROUP)
        codes = codes.transpose(0, 2, 3, 1)  # [block, group, input feature, output feature]
        if self.format.bits == 4:  # the first half of the group in the low bits
            low, high = np.split(codes, 2, axis=2)
            codes = low | high << 4
        n = self.interleaved
        shape = (self.num_blocks, self.num_groups, -1, n, self.width)
        parts = [codes.reshape(shape).swapaxes(3, 4)]
        parts += [array.transpose(0, 2, 1).astype(self.scale_dtype) for array in blocks[1:]]
        as_bytes = [
            np.ascontiguousarray(part).view("u1").reshape(*self.shape[:2], -1) for part in parts
        ]
        return np.concatenate(as_bytes, axis=-1)
