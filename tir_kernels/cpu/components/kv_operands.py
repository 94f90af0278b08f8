# SPDX-License-Identifier: Apache-2.0
"""The operands that attention kernels of a spec multiply: float32 or pairs of bfloat16."""

from __future__ import annotations

from ...codec import codec_of
from ...semantics.rotary_mode import has_rope
from ...spec import KernelSpec
from ..bf16 import PairOperands
from ..operands import Float32Operands
from .quantized_pairs import QuantizedPairs


def operands(spec: KernelSpec, kv_dtype: str):
    """Choose the operands for a spec and the type of K and V."""
    target = spec.target
    if target.has_bf16_dot and target.lanes == PairOperands.lanes:
        # Both numbers of a pair have to rotate alike.
        pairs = spec.rope.rotary_dim % 4 == 0 or not has_rope(spec)
        if spec.dtype == "bfloat16" and pairs:
            if kv_dtype == "bfloat16":
                return PairOperands()
            if codec_of(kv_dtype) is not None:
                return QuantizedPairs()
    return Float32Operands(spec.target.lanes)


def single_row_operands(spec: KernelSpec, ops):
    """Those of the rows that attend alone: `ops`, where they serve rows as they lie in the pages.

    Pairs ask for rows of whole half vectors, and for both rows of a pair of positions in one page.
    Quantized rows would be rounded to pairs again by every step.
    """
    if isinstance(ops, QuantizedPairs):
        return Float32Operands(spec.target.lanes)
    is_whole = spec.qk_head_dim % 16 == 0 and spec.v_head_dim % 16 == 0
    if ops.numbers == 1 or (is_whole and spec.page_size % ops.numbers == 0):
        return ops
    return Float32Operands(spec.target.lanes)
