# SPDX-License-Identifier: Apache-2.0
"""Tensors of GGUF files whose codes are kept as they are: Q8_0, Q4_0, Q4_1 and MXFP4."""

from __future__ import annotations

import numpy as np

from ..formats import mxfp4
from ..formats.weight_formats import INT4, INT4_MINIMA, INT8, MXFP4, QuantizedRows, WeightFormat

# Types of blocks of 32 elements: float16 scale, float16 minimum where there is one, codes. The
# scale of MXFP4 is a byte.
KEPT_TYPES: dict[str, WeightFormat] = {
    "Q8_0": INT8,
    "Q4_0": INT4,
    "Q4_1": INT4_MINIMA,
    "MXFP4": MXFP4,
}


def split_blocks(rows: np.ndarray, format: WeightFormat) -> QuantizedRows:
    """Return the codes, scales and minima of rows of bytes ``uint8 [num_rows, num_bytes]``."""
    header = 1 if format.is_mxfp4 else 4 if format.has_minima else 2
    blocks = rows.reshape(len(rows), -1, header + 4 * format.bits)
    codes = blocks[..., header:]
    if format.bits == 8:
        codes = codes ^ np.uint8(0x80)  # signed bytes, plus 128
    else:
        codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    if format.is_mxfp4:
        scales = np.ascontiguousarray(blocks[..., 0])
        mxfp4.check_scales(scales)
        return QuantizedRows(format, codes.reshape(len(rows), -1), scales)
    halves = np.ascontiguousarray(blocks[..., :header]).view("<f2")
    minima = halves[..., 1] if format.has_minima else None
    return QuantizedRows(format, codes.reshape(len(rows), -1), halves[..., 0], minima)
