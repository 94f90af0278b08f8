# SPDX-License-Identifier: Apache-2.0
"""Random matrices in the formats of quantized weights."""

from __future__ import annotations

import numpy as np

from tvm_pagedkv_lm.formats.weight_formats import GROUP, QuantizedRows, WeightFormat, quantize


def random_codes(rng: np.random.Generator, shape, format: WeightFormat) -> QuantizedRows:
    """A matrix with numbers of about one; mxfp4 is read, but nothing is rounded to it."""
    if not format.is_mxfp4:
        return quantize(rng.standard_normal(shape, dtype=np.float32), format)
    rows, columns = shape
    codes = rng.integers(0, 16, shape).astype("uint8")
    scales = rng.integers(121, 127, (rows, columns // GROUP)).astype("uint8")
    return QuantizedRows(format, codes, scales)
