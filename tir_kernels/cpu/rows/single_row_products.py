# SPDX-License-Identifier: Apache-2.0
"""The products of single rows that suit the pages of a spec."""

from __future__ import annotations

from ...spec import KernelSpec
from ..isa.bytes import bit_masks, byte_pairs, words
from ..isa.bytes.byte_dots import byte_dots
from .code_blocks import has_code_blocks
from .code_products import CodeProducts
from .matrix_code_products import MatrixCodeProducts
from .query_rows import QueryRows
from .row_products import RowProducts
from .word_products import has_word_products, word_products_of


def products_of(spec: KernelSpec, ops, rows: QueryRows, is_listed: bool = False) -> RowProducts:
    """Make the products that suit the pages of a spec; they need `helpers_of` it.

    Those of codes take neighbouring slots, so listed rows are multiplied one by one.
    """
    if is_listed:
        return RowProducts(spec, ops, rows)
    if has_word_products(spec):
        return word_products_of(spec)(spec, ops, rows)
    if not has_code_blocks(spec):
        return RowProducts(spec, ops, rows)
    return (MatrixCodeProducts if spec.target.has_smmla else CodeProducts)(spec, ops, rows)


def helpers_of(spec: KernelSpec, is_listed: bool = False) -> tuple[str, ...]:
    """Return the LLVM functions of the products of a spec, besides those of the operands."""
    if is_listed:
        return ()
    if has_word_products(spec):
        return (words.LLVM_HELPERS, byte_pairs.LLVM_HELPERS)
    if not has_code_blocks(spec):
        return ()
    has_bits = any(codec.has_bit_plane for codec in (spec.codec.k, spec.codec.v))
    return (*byte_dots(spec.target).llvm_helpers, *([bit_masks.LLVM_HELPERS] if has_bits else []))
