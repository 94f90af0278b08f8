# SPDX-License-Identifier: Apache-2.0
"""Numbers of mxfp4: codes of 4 bits, and a power of two for every 32 of them.

A code is a sign, two bits of exponent and one of mantissa (e2m1). Twice its number is a whole
number of at most 12, which is what products of codes use.
"""

from __future__ import annotations

import numpy as np

# Twice the number of each code.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LARGEST = 12
_NAN = 255  # the only scale that is no power of two


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Return half of each power of two of scales uint8, as float32: factors on `DOUBLED`."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 128)


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers of codes uint8 ``[..., n]`` with scales uint8 ``[...]``, as float32."""
    return np.array(DOUBLED, np.float32)[codes] * scale_values(scales)[..., None]


def unpack_blocks(blocks: np.ndarray) -> np.ndarray:
    """Return the codes of blocks uint8 ``[..., 16]`` of Hugging Face: neighbours share a byte."""
    both = np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)
    return both.reshape(*blocks.shape[:-1], -1)


def check_scales(scales: np.ndarray) -> None:
    """Raise a ValueError if a scale stands for NaN."""
    if (scales == _NAN).any():
        raise ValueError("has a scale of 255, which stands for NaN")
