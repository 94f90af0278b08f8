# SPDX-License-Identifier: Apache-2.0
"""The types of a step's tensors and of pages."""

from __future__ import annotations

from .._codecs import CODECS

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = tuple(ITEMSIZE)
KV_DTYPES = (*DTYPES, *CODECS)
