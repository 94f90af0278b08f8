# SPDX-License-Identifier: Apache-2.0
"""The types of GGUF tensors that are read, and their numbers as float32."""

from __future__ import annotations

import numpy as np

READABLE_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "MXFP4",
)  # fmt: skip


def _gguf():
    """Return the package ``gguf``, which is imported when a GGUF file is read."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error.name} is not installed; install what GGUF files need with: "
            "pip install 'tvm-pagedkv[demo]'"
        ) from None
    return gguf


def type_name(type_id: int) -> str:
    """Return the name of a type, such as "Q4_K"."""
    try:
        return _gguf().GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"


def block_sizes(type_id: int) -> tuple[int, int]:
    """Return the elements and the bytes of a block of this type.

    Raises
    ------
    ValueError
        If the type is not read; the message follows the name of the tensor.
    """
    name = type_name(type_id)
    if name not in READABLE_TYPES:
        raise ValueError(f"has type {name}; expected one of {', '.join(READABLE_TYPES)}")
    gguf = _gguf()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]


def dequantize(rows: np.ndarray, type_id: int) -> np.ndarray:
    """Return rows of bytes ``uint8 [..., num_bytes]`` as float32 ``[..., num_elements]``."""
    gguf = _gguf()
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type_id))
