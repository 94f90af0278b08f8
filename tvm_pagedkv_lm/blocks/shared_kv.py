# SPDX-License-Identifier: Apache-2.0
"""`SharedAttention`: layers that attend to the K and V of an earlier layer.

They have a projection of Q only, and the cache keeps nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.config import RopeConfig
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import row_kernels as kernels
from ..kernels.rows.rotary_kernels import take_heads
from ..weights.weight_parts import Output, Weight, columns, rows, vector
from .projections import Linear, SplitLinear


@dataclass
class StepRows:
    """What the layers of a step have in common.

    Parameters
    ----------
    inputs : tensor ``[n, row_width]``, optional
        The rows that `Decoder.embed` made, with the inputs of each layer.
    chosen : tensor, optional
        The positions that the last indexer chose for each row.
    is_decode : bool
        Whether layers with a budget keep to it: not in a prefill, also not in one of single rows.
    shared_kv : dict
        K ``[n, num_kv_heads * head_dim]`` and V of layers to which later ones attend, by layer, as
        the pages of the cache hold them.
    """

    inputs: nn.Tensor | None = None
    chosen: nn.Tensor | None = None
    is_decode: bool = True
    shared_kv: dict[int, tuple[nn.Tensor, nn.Tensor]] = field(default_factory=dict)


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


class SharedAttention(nn.Module):
    """Attention of a layer to the K and V of an earlier one."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, name: str, source: int):
        dim, rope = config.head_dim_of(source), config.layers[source].rope
        self.source, self.heads = source, Heads(dim, rope, options)
        self.num_heads, self.dim = config.num_heads, dim
        self.num_kv_heads = config.kv_heads_of(source)
        self.scale, self.epsilon, self.options = config.sm_scale, config.norm_eps, options
        width = self.num_heads * self.dim
        self.q_proj = Linear(
            config.hidden_size, width, options, config.qkv_bias, name=f"{name}.q_proj"
        )
        self.q_norm = nn.Parameter((self.dim,), "float32") if config.qk_norm == "head" else None
        self.o_proj = SplitLinear(
            width, config.hidden_size, options, config.o_bias, name=f"{name}.o_proj"
        )

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        step: StepRows,
    ) -> nn.Tensor:
        n, dim, options = x.shape[0], self.dim, self.options
        q = self.q_proj(x)
        if self.q_norm is not None:
            kernel = kernels.norm(dim, self.epsilon, options.dtype, options.vector)
            heads = op.reshape(q, (n * self.num_heads, dim))
            normed = op.tensor_ir_op(kernel, "norm", [heads, self.q_norm], heads)
            q = op.reshape(normed, (n, self.num_heads * dim))
        q = self.heads.take(q, 0, self.num_heads, cache)
        kv_shape = (1, n, self.num_kv_heads, dim)
        k, v = (op.reshape(each, kv_shape) for each in step.shared_kv[self.source])
        q = op.reshape(q, (1, n, self.num_heads, dim))
        out = cache.attention_with_shared_kv(self.source, q, k, v, self.scale)
        return self.o_proj(op.reshape(out, (n, self.num_heads * dim)), residual)


def shared_attention_weights(
    config: DecoderConfig, ours: str, theirs: str, source: int
) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of a `SharedAttention`."""
    names, hidden, dim = config.names, config.hidden_size, config.head_dim_of(source)
    width = config.num_heads * dim
    q_proj = [Output("q_proj", width)]
    yield from rows(f"{ours}.q_proj", theirs, q_proj, hidden, bias=config.qkv_bias)
    out = f"{ours}.o_proj", f"{theirs}.{names.attention_output}"
    yield from columns(*out, (hidden, width), bias=config.o_bias)
    if config.qk_norm == "head":
        theirs = f"{theirs}.{names.q_norm}.weight"
        yield vector(f"{ours}.q_norm", theirs, dim, offset=config.norm_offset)
