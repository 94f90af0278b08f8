# SPDX-License-Identifier: Apache-2.0
"""The choice between the codes of K and the numbers that they stand for."""

from tvm.script import tirx as T

from ...script import inline
from .kv_blocks import KvBlocks
from .row_products import RowProducts


@T.meta_class
class KCodeProducts(RowProducts):
    """As `RowProducts`, for classes that multiply Q with the codes of K in ``_multiply_codes(kv)``.

    K that is rotated here is no longer its codes, so `RowProducts` multiplies it.
    """

    @inline
    def multiply_q_k(self, kv: KvBlocks):
        """``S = Q K^T`` for a block of positions."""
        if self.rope.rotates_k:
            RowProducts.multiply_q_k(self, kv)
        else:
            self._multiply_codes(kv)
