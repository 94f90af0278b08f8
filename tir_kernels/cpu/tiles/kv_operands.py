# SPDX-License-Identifier: Apache-2.0
"""The operands that attention kernels of a spec multiply: float32 or pairs of bfloat16."""

from __future__ import annotations

from ...codec import codec_of
from ...semantics.rotary_mode import has_rope
from ...spec import KernelSpec, VectorTarget
from ..isa.bf16 import PairOperands
from ..isa.matrices.tile_pairs import QuantizedTilePairs, TilePairs
from ..isa.neon.numbers import NeonNumbers
from ..isa.neon.pairs import NeonPairs
from ..isa.operands import Float32Operands
from ..isa.quantized_pairs import QuantizedNeonPairs, QuantizedPairs


def operands(spec: KernelSpec, kv_dtype: str):
    """Choose the operands of products of matrices for a spec and the type of K and V."""
    target = spec.target
    if target.has_amx and _are_pairs(spec):
        if kv_dtype == "bfloat16":
            return TilePairs()
        if codec_of(kv_dtype) is not None:
            return QuantizedTilePairs()
    if (target.has_bfdot or target.multiplies_pairs) and _are_pairs(spec):
        if kv_dtype == "bfloat16":
            return _pairs(target)
        if codec_of(kv_dtype) is not None:
            return QuantizedNeonPairs() if target.has_bfdot else QuantizedPairs()
    return NeonNumbers(target.lanes) if target.is_neon else Float32Operands(target.lanes)


def single_row_operands(spec: KernelSpec, tile_operands=None):
    """Choose the operands of rows that attend alone, which multiply rows as they lie in the pages.

    Pairs ask for rows of whole half vectors, and for both rows of a pair of positions in one page.
    Quantized rows would be rounded to pairs again by every step. These rows wait for memory, so
    they are pairs also where the product of pairs is slow.

    Parameters
    ----------
    spec : KernelSpec
    tile_operands : operands object, optional
        Those of the same kernel's register tiles, which are taken where they serve.
    """
    is_whole = spec.qk_head_dim % 16 == 0 and spec.v_head_dim % 16 == 0
    if spec.kv_dtype == "bfloat16" and _are_pairs(spec) and is_whole and spec.page_size % 2 == 0:
        return tile_operands if isinstance(tile_operands, PairOperands) else _pairs(spec.target)
    if isinstance(tile_operands, Float32Operands):
        return tile_operands
    return Float32Operands(spec.target.lanes)


def _are_pairs(spec: KernelSpec) -> bool:
    """Whether rows of Q can be pairs of bfloat16: both numbers of a pair have to rotate alike."""
    target = spec.target
    has_pairs = target.has_bf16_dot and target.lanes == PairOperands.lanes
    if not (target.has_bfdot or has_pairs):
        return False
    return spec.dtype == "bfloat16" and (spec.rope.rotary_dim % 4 == 0 or not has_rope(spec))


def _pairs(target: VectorTarget) -> PairOperands:
    """Return the pairs of bfloat16 of a target."""
    return NeonPairs() if target.has_bfdot else PairOperands()
