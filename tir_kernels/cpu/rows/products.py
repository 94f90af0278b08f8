# SPDX-License-Identifier: Apache-2.0
"""The products of single query rows that suit the pages and the CPU of a spec.

Q times K and weights times V are chosen apart: `FloatQK` and `FloatPV` read what lies in the pages
as numbers, `ByteQK` and `BytePV` multiply codes as bytes, `WordQK` and `WordPV` as words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.bf16 import PairOperands, are_pairs, pair_operands
from ..isa.bytes import packing, words
from ..isa.bytes.dots import BytePairs, byte_dots
from ..isa.operands import Float32Operands
from .byte_products import BytePV, ByteQK
from .code_rows import CodeRows
from .float_products import FloatPV, FloatQK
from .word_products import CODES, WordPV, WordQK


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
    if spec.kv_dtype == "bfloat16" and are_pairs(spec) and is_whole and spec.page_size % 2 == 0:
        if isinstance(tile_operands, PairOperands):
            return tile_operands
        return pair_operands(spec.target)
    if isinstance(tile_operands, Float32Operands):
        return tile_operands
    return Float32Operands(spec.target.lanes)


class Products(NamedTuple):
    """Q times K, and weights times V: each has the methods of `FloatQK` or of `FloatPV`."""

    qk: Any
    pv: Any


def products_of(spec: KernelSpec, ops, rope, factor, *, is_listed: bool = False) -> Products:
    """Make the products of a spec, in a task; they need `helpers_of` it.

    Products with codes take neighbouring slots, so listed rows are multiplied as numbers.
    """
    qk = FloatQK(spec, ops, rope, factor)
    if is_listed or not (has_word_products(spec) or has_byte_products(spec)):
        return Products(qk, FloatPV(spec, ops))
    if has_word_products(spec):
        codes = ByteQK(spec, BytePairs()) if spec.codec.k.is_packed else WordQK(spec)
        pv = WordPV(spec, codes.positions)
    else:
        dots = byte_dots(spec.target)
        codes, pv = ByteQK(spec, dots), BytePV(spec, dots)
    return Products(UnlessRotated(codes, qk, rope), pv)


def helpers_of(spec: KernelSpec, *, is_listed: bool = False) -> tuple[str, ...]:
    """Return the LLVM functions of the products of a spec, besides those of the operands."""
    if is_listed:
        return ()
    if has_word_products(spec):
        return (words.LLVM_HELPERS, *BytePairs.llvm_helpers)
    if not has_byte_products(spec):
        return ()
    has_bits = any(codec.has_high_bits for codec in (spec.codec.k, spec.codec.v))
    return (*byte_dots(spec.target).llvm_helpers, *([packing.MASK_HELPERS] if has_bits else []))


def has_word_products(spec: KernelSpec) -> bool:
    """Whether the codes of a spec are multiplied as words."""
    if spec.codec is None or not spec.target.has_word_dot or spec.qk_head_dim > 256:
        return False
    return all(
        each.is_integer and not each.has_high_bits and CodeRows(spec, each).code_bytes % CODES == 0
        for each in (spec.codec.k, spec.codec.v)
    )


def has_byte_products(spec: KernelSpec) -> bool:
    """Whether the codes of a spec are multiplied as bytes."""
    if spec.codec is None or byte_dots(spec.target) is None or spec.qk_head_dim > 256:
        return False
    return all(
        each.is_integer and CodeRows(spec, each).code_bytes % 16 == 0
        for each in (spec.codec.k, spec.codec.v)
    )


@T.meta_class
class UnlessRotated:
    """Q times the codes of K; K that the call rotates is no longer its codes.

    Parameters
    ----------
    codes : ByteQK or WordQK
    floats : FloatQK
    rope : rotation object
    """

    def __init__(self, codes, floats: FloatQK, rope):
        self.codes, self.floats, self.rope = codes, floats, rope
        self.begin_head, self.begin_block = codes.begin_head, floats.begin_block

    @inline
    def multiply(self, q, kv, scores):
        """``S = Q K^T`` for a local head and a block of positions."""
        if self.rope.rotates_k:
            self.floats.multiply(q, kv, scores)
        else:
            self.codes.multiply(q, kv, scores)
