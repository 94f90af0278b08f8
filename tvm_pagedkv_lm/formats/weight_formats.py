# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: the formats, and matrices in them before they are packed.

A number is ``scale * (code - zero)``, or ``scale * code + minimum``. Scales and minima are float16
numbers, one for each `GROUP` input features of an output feature. The formats have the codes of
GGUF's Q8_0, Q4_0 and Q4_1, so tensors of these types are kept without rounding. So are those of
mxfp4, which has numbers and scales of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import mxfp4

GROUP = 32  # input features that share a scale


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix of weights is quantized.

    Parameters
    ----------
    name : str
    bits : int
        Bits of a code, which is unsigned: 8 or 4.
    zero : int
        The code of the number zero; 0 where groups have a minimum.
    has_minima : bool
        Whether groups have a minimum.
    is_mxfp4 : bool
        Whether codes and scales are those of `mxfp4`. `zero` is then what is added to twice a
        number, so that the result is not negative.
    """

    name: str
    bits: int
    zero: int
    has_minima: bool = False
    is_mxfp4: bool = False

    def num_bytes(self, num_weights: int) -> int:
        """Return the bytes of codes, scales and minima."""
        scale_bytes = 1 if self.is_mxfp4 else 2 + 2 * self.has_minima
        return num_weights * self.bits // 8 + num_weights // GROUP * scale_bytes

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


INT8 = WeightFormat("int8", 8, 128)
INT4 = WeightFormat("int4", 4, 8)
INT4_MINIMA = WeightFormat("int4_minima", 4, 0, has_minima=True)
MXFP4 = WeightFormat("mxfp4", 4, mxfp4.LARGEST, is_mxfp4=True)
FORMATS = {each.name: each for each in (INT8, INT4, INT4_MINIMA, MXFP4)}


class QuantizedRows(NamedTuple):
    """A matrix, or some rows or groups of it, in a quantized format.

    codes: uint8 ``[rows, in_features]``; scales, minima: float16 ``[rows, in_features / GROUP]``,
    minima None where the format has none. Scales of mxfp4 are uint8.
    """

    format: WeightFormat
    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.codes.shape

    def arrays(self) -> list[np.ndarray]:
        """Return codes, scales, and minima if there are any."""
        return [self.codes, self.scales] + ([] if self.minima is None else [self.minima])

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> QuantizedRows:
        """Return the matrix after a function that moves or takes rows, or groups."""
        return QuantizedRows(self.format, *map(function, self.arrays()))

    def values(self) -> np.ndarray:
        """Return the numbers as float32 ``[rows, in_features]``."""
        if self.format.is_mxfp4:
            codes = self.codes.reshape(*self.scales.shape, GROUP)
            return mxfp4.values(codes, self.scales).reshape(self.codes.shape)
        scales, codes = (x.astype(np.float32) for x in (self.scales, self.codes))
        codes = codes.reshape(*scales.shape, GROUP)
        if self.minima is None:
            found = scales[..., None] * (codes - np.float32(self.format.zero))
        else:
            found = scales[..., None] * codes + self.minima.astype(np.float32)[..., None]
        return found.reshape(self.codes.shape)

    def converted(self, format: WeightFormat) -> QuantizedRows:
        """Return the matrix in another format: with the same numbers where it has them, or rounded.

        INT8 has all numbers of INT4 and of MXFP4, and so has INT4_MINIMA those of INT4, unless a
        scale, or eight times a scale, is not a float16.
        """
        if format == self.format:
            return self
        if (self.format, format) == (MXFP4, INT8):
            scales = mxfp4.scale_values(self.scales)
            halves = np.where(scales <= 2.0**15, scales, np.inf).astype(np.float16)
            if (halves == scales).all():
                codes = np.array(mxfp4.DOUBLED, np.int16)[self.codes] + INT8.zero
                return QuantizedRows(INT8, codes.astype(np.uint8), halves)
        if (self.format, format) == (INT4, INT8):
            return QuantizedRows(INT8, self.codes + np.uint8(INT8.zero - INT4.zero), self.scales)
        if (self.format, format) == (INT4, INT4_MINIMA):
            minima = self.scales * np.float16(-INT4.zero)
            if np.isfinite(minima).all():
                return QuantizedRows(INT4_MINIMA, self.codes, self.scales, minima)
        return quantize(self.values(), format)


def concatenate(parts: Iterable[QuantizedRows]) -> QuantizedRows:
    """Return the rows of matrices of one format as one matrix."""
    parts = list(parts)
    arrays = zip(*(part.arrays() for part in parts), strict=True)
    return QuantizedRows(parts[0].format, *map(np.concatenate, arrays))


def can_quantize(in_features: int) -> bool:
    """Return whether a matrix with so many input features can be quantized."""
    return in_features % GROUP == 0


def quantize(weight: np.ndarray, format: WeightFormat) -> QuantizedRows:
    """Round a matrix to the nearest codes.

    The scale of a group is its largest magnitude / 127 (INT8), its number of the largest magnitude
    / -8 (INT4), or the distance of its minimum and maximum / 15 (INT4_MINIMA).

    Parameters
    ----------
    weight : ``[rows, in_features]``
        `in_features` is a multiple of `GROUP`.
    format : WeightFormat

    Raises
    ------
    ValueError
        If a number is not finite, a scale exceeds float16, or nothing is rounded to the format.
    """
    if format.is_mxfp4:
        raise ValueError("weights are not rounded to mxfp4, which is only read")
    rows, in_features = weight.shape
    numbers = weight.astype(np.float32).reshape(rows, in_features // GROUP, GROUP)
    minima = None
    if format.has_minima:
        minima = _half(numbers.min(-1))
        scales = _half((numbers.max(-1) - numbers.min(-1)) / format.max_code)
        shifted = numbers - minima.astype(np.float32)[..., None]
    elif format.bits == 8:
        scales, shifted = _half(np.abs(numbers).max(-1) / 127), numbers
    else:
        largest = np.take_along_axis(numbers, np.abs(numbers).argmax(-1)[..., None], -1)[..., 0]
        scales, shifted = _half(largest / -format.zero), numbers
    exact = scales.astype(np.float32)[..., None]
    inverse = np.divide(1, exact, out=np.zeros_like(exact), where=exact != 0)
    codes = np.rint(shifted * inverse) + np.float32(format.zero)
    codes = np.clip(codes, 0, format.max_code).astype(np.uint8)
    return QuantizedRows(format, codes.reshape(rows, in_features), scales, minima)


def _half(values: np.ndarray) -> np.ndarray:
    """Round scales or minima to float16."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ValueError(
            "weights cannot be quantized: a group has a number that is not finite or too large "
            "for a float16 scale"
        )
    return rounded
