# SPDX-License-Identifier: Apache-2.0
"""The operands that attention kernels of a spec multiply: float32 or pairs of bfloat16."""

from __future__ import annotations

from ...codec import codec_of
from ...spec import KernelSpec
from ..isa.bf16 import are_pairs, pair_operands
from ..isa.matrices.tile_pairs import QuantizedTilePairs, TilePairs
from ..isa.operands import Float32Operands
from ..isa.quantized_pairs import QuantizedNeonPairs, QuantizedPairs


def operands(spec: KernelSpec, kv_dtype: str):
    """Choose the operands of products of matrices for a spec and the type of K and V."""
    target = spec.target
    if target.has_amx and are_pairs(spec):
        if kv_dtype == "bfloat16":
            return TilePairs()
        if codec_of(kv_dtype) is not None:
            return QuantizedTilePairs()
    if (target.has_bfdot or target.multiplies_pairs) and are_pairs(spec):
        if kv_dtype == "bfloat16":
            return pair_operands(target)
        if codec_of(kv_dtype) is not None:
            return QuantizedNeonPairs() if target.has_bfdot else QuantizedPairs()
    return Float32Operands(target.lanes, steps="lanes" if target.is_neon else None)
