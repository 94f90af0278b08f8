# SPDX-License-Identifier: Apache-2.0
"""Tensors of GGUF files whose codes are kept as they are: Q8_0, Q4_0 and Q4_1."""

from __future__ import annotations

import numpy as np

from ..weight_formats import INT4, INT4_MINIMA, INT8, QuantizedRows, WeightFormat

# Types of blocks of 32 elements: float16 scale, float16 minimum where there is one, codes.
KEPT_TYPES: dict[str, WeightFormat] = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4_MINIMA}


def split_blocks(rows: np.ndarray, format: WeightFormat) -> QuantizedRows:
    """Return the codes, scales and minima of rows of bytes ``uint8 [num_rows, num_bytes]``."""
    header = 4 if format.has_minima else 2
    blocks = rows.reshape(len(rows), -1, header + 4 * format.bits)
    halves = np.ascontiguousarray(blocks[..., :header]).view("<f2")
    codes = blocks[..., header:]
    if format.bits == 8:
        codes = codes ^ np.uint8(0x80)  # signed bytes, plus 128
    else:
        codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    minima = halves[..., 1] if format.has_minima else None
    return QuantizedRows(format, codes.reshape(len(rows), -1), halves[..., 0], minima)
