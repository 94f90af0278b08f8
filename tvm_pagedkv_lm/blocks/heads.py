# SPDX-License-Identifier: Apache-2.0
"""`Heads`: some heads out of rows of several, rotated."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.config import RopeConfig
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.options import BuildOptions
from ..kernels.rows.rotary_kernels import take_heads


class Heads:
    """Takes heads of `dim` features out of rows of several heads, and rotates them.

    Where sequences may have windows, the cache rotates what it reads, and nothing is rotated here.
    """

    def __init__(self, dim: int, rope: RopeConfig | None, options: BuildOptions):
        self.dim, self.options = dim, options
        rope = rope or RopeConfig()
        self.rope: RopeSpec | None = None
        if not options.sliding_window and rope.mode != "none":
            width = rope.rotary_dim or self.dim
            self.rope = RopeSpec(rope.theta, rope.scale, width, rope.scaling)

    def take(
        self,
        x: nn.Tensor,
        first: int,
        count: int,
        cache: PagedKVCacheObject,
        *,
        rotates: bool = True,
    ) -> nn.Tensor:
        """Return heads from `first` on as ``[n, count * head_dim]``."""
        n, dim, options = x.shape[0], self.dim, self.options
        rope = self.rope if rotates else None
        num_rows = int(x.shape[1]) // dim
        if rope is None and count == num_rows:
            return x
        kernel = take_heads((first, count, dim), num_rows, rope, options.dtype, options.vector)
        positions = [] if rope is None else [cache.get_query_positions(n)]
        out = nn.Tensor.placeholder((n, count * dim), options.dtype)
        return op.tensor_ir_op(kernel, "take_heads", [x, *positions], out)
