# SPDX-License-Identifier: Apache-2.0
"""`LatentAttention`: multi-head latent attention (MLA), as in DeepSeek V2 and V3.

The cache keeps one row per token: what K and V of all heads are projected from, and a part of K
that carries the rotation. A step attends to its own rows with K and V of each head, and to the past
with Q and the output multiplied by these projections instead (absorbed), so that the rows of the
cache are K and V as they are. Both results are merged in the space of V.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tir_kernels.codec import Codec, CodecPair
from tir_kernels.spec import RopeSpec
from tvm_pagedkv.config import LayerSpec, RopeConfig
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.latent_config import Latent
from ..config.options import BuildOptions
from ..config.part import AttentionPart
from ..kernels.linear.head_linear import HeadLinear
from ..kernels.rows import norms
from ..kernels.rows.latent_kernels import latent_keys, latent_queries, latent_rows, merge_states
from ..weights.weight_parts import Output, Part, Weight, Weights, columns, rows, vector
from .projections import Linear, SplitLinear
from .step_rows import StepRows

BLOCK = "self_attn"  # of the tensors in a layer
NORM_EPSILON = 1e-6  # of compressed Q, K and V, whatever the norms of layers have


@dataclass(frozen=True)
class LatentAttention(AttentionPart):
    """Attention of all heads to one row for each position.

    Parameters
    ----------
    num_heads : int
    shape : Latent
        The widths.
    spec : LayerSpec
        The layer of the cache, by whose rotation the model rotates.
    scale : float
        Factor on the attention logits.
    down_bias, o_bias : bool
        Whether the projections to the compressed Q, K and V, and the last one, have biases.
    """

    num_heads: int
    shape: Latent
    spec: LayerSpec
    scale: float
    down_bias: bool = False
    o_bias: bool = False

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        return (self.spec,)

    @property
    def pages(self) -> LayerSpec:
        return self.spec

    @property
    def product_width(self) -> int:
        return (self.shape.width + self.shape.rank) * self.num_heads // 2  # absorbed

    def position_bytes(self, itemsize: int, codec: Codec | CodecPair | None) -> int:
        width = self.shape.width
        if codec is None:
            return width * itemsize
        return codec.k.row_bytes(width) + codec.k.scale_bytes(width, self.shape.rank)

    @property
    def whole_because(self) -> str | None:
        return "workers do not share latent attention (MLA), whose rows all heads read"

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> LatentProjections:
        return LatentAttentionBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{BLOCK}"
        yield from projection_weights(self, config, ours, theirs)
        yield f"{ours}.k_up.weight", _of_heads(self, theirs, 0, self.shape.nope_dim)


class LatentProjections(nn.Module):
    """The projections around absorbed attention to latent rows."""

    def __init__(
        self, part: LatentAttention, config: DecoderConfig, options: BuildOptions, name: str
    ):
        shape, heads, hidden = part.shape, part.num_heads, config.hidden_size
        self.shape, self.num_heads, self.options = shape, heads, options
        self.scale, self.rope = part.scale, _rope_spec(part.spec.rope or RopeConfig(), shape)

        def linear(width: int, out: int, part: str, bias: bool = False) -> Linear:
            return Linear(width, out, options, bias, name=f"{name}.{part}")

        self.q_down = self.q_norm = None
        if shape.q_rank is not None:
            self.q_down = linear(hidden, shape.q_rank, "q_down", part.down_bias)
            self.q_norm = nn.Parameter((shape.q_rank,), "float32")
        q_width = shape.q_rank or hidden
        self.q_nope = linear(q_width, heads * shape.nope_dim, "q_nope")
        self.q_rope = linear(q_width, heads * shape.rope_dim, "q_rope")
        self.kv_down = linear(hidden, shape.width, "kv_down", part.down_bias)
        self.kv_norm = nn.Parameter((shape.rank,), "float32")

        self.v_up = HeadLinear(heads, shape.rank, shape.v_dim, options, f"{name}.v_up")
        self.q_absorb = HeadLinear(heads, shape.nope_dim, shape.rank, options, f"{name}.q_absorb")
        self.o_proj = SplitLinear(
            heads * shape.v_dim, hidden, options, part.o_bias, name=f"{name}.o_proj"
        )

    def rows(self, x: nn.Tensor, positions: nn.Tensor) -> list[nn.Tensor]:
        """Return the compressed K and V, and the rows of the cache."""
        options, shape = self.options, self.shape
        kernel = latent_rows(shape, NORM_EPSILON, self.rope, options.dtype, options.vector)
        outs = [
            nn.Tensor.placeholder((x.shape[0], width), options.dtype)
            for width in (shape.rank, shape.width)
        ]
        return list(op.tensor_ir_op(kernel, "latent_rows", [x, self.kv_norm, positions], outs))

    def compress_q(self, x: nn.Tensor) -> nn.Tensor:
        """Return what Q is projected from: the hidden state, or the compressed Q."""
        shape, options = self.shape, self.options
        if self.q_down is None:
            return x
        assert shape.q_rank is not None
        x = self.q_down(x)
        kernel = norms.norm(shape.q_rank, NORM_EPSILON, options.dtype, options.vector)
        return op.tensor_ir_op(kernel, "norm", [x, self.q_norm], x)

    def queries(self, x: nn.Tensor, positions: nn.Tensor) -> list[nn.Tensor]:
        """Return Q for rows of this step, and Q for rows of the cache, of the compressed Q."""
        n, shape, heads, options = x.shape[0], self.shape, self.num_heads, self.options
        nope = self.q_nope(x)
        absorbed = self.q_absorb.of_each(op.reshape(nope, (n * heads, shape.nope_dim)))
        inputs = [
            op.reshape(nope, (n, heads, shape.nope_dim)),
            op.reshape(self.q_rope(x), (n, heads, shape.rope_dim)),
            op.reshape(absorbed, (n, heads, shape.rank)),
            positions,
        ]
        kernel = latent_queries(shape, heads, self.rope, options.dtype, options.vector)
        outs = [
            nn.Tensor.placeholder((n, heads, width), options.dtype)
            for width in (shape.qk_dim, shape.width)
        ]
        return list(op.tensor_ir_op(kernel, "latent_queries", inputs, outs))


class LatentAttentionBlock(LatentProjections):
    """Attention to all positions: to the rows of this step by heads, and to the past absorbed."""

    def __init__(
        self, part: LatentAttention, config: DecoderConfig, options: BuildOptions, name: str
    ):
        super().__init__(part, config, options, name)
        shape = self.shape
        self.k_up = HeadLinear(self.num_heads, shape.rank, shape.nope_dim, options, f"{name}.k_up")

    def forward(
        self,
        x: nn.Tensor,
        residual: nn.Tensor | None,
        cache: PagedKVCacheObject,
        layer: int,
        step: StepRows,
    ) -> nn.Tensor:
        n, shape, heads = x.shape[0], self.shape, self.num_heads
        positions = cache.get_query_positions(n)
        compressed, latent = self.rows(self.kv_down(x), positions)
        q, q_latent = self.queries(self.compress_q(x), positions)
        k, v = self._keys(compressed, latent), self.v_up.of_shared(compressed)
        cache = cache.append_mla_kv(layer, op.reshape(latent, (1, n, 1, shape.width)))
        parts = [(q, shape.qk_dim), (k, shape.qk_dim), (v, shape.v_dim)]
        of_step = [op.reshape(each, (1, n, heads, width)) for each, width in parts]
        own, own_lse = cache.self_attention(layer, *of_step, self.scale)
        q_latent = op.reshape(q_latent, (1, n, heads, shape.width))
        past, past_lse = cache.cross_attention(layer, q_latent, shape.rank, self.scale)
        past = self.v_up.of_each(op.reshape(past, (n * heads, shape.rank)), "float32")
        states = [
            op.reshape(each, (n, heads, *width))
            for each, width in (
                (own, (shape.v_dim,)), (own_lse, ()), (past, (shape.v_dim,)), (past_lse, ())
            )
        ]  # fmt: skip
        kernel = merge_states(heads, shape.v_dim, self.options.dtype, self.options.vector)
        out = nn.Tensor.placeholder((n, heads, shape.v_dim), self.options.dtype)
        merged = op.tensor_ir_op(kernel, "merge_states", states, out)
        return self.o_proj(op.reshape(merged, (n, heads * shape.v_dim)), residual)

    def _keys(self, compressed: nn.Tensor, latent: nn.Tensor) -> nn.Tensor:
        """Return K of each head."""
        n, shape, heads, options = latent.shape[0], self.shape, self.num_heads, self.options
        nope = op.reshape(self.k_up.of_shared(compressed), (n, heads, shape.nope_dim))
        out = nn.Tensor.placeholder((n, heads, shape.qk_dim), options.dtype)
        kernel = latent_keys(shape, heads, options.dtype, options.vector)
        return op.tensor_ir_op(kernel, "latent_keys", [nope, latent], out)


def _rope_spec(rope: RopeConfig, shape: Latent) -> RopeSpec | None:
    """Return the rotation of a layer; None if it has none."""
    if rope.mode == "none":
        return None
    return RopeSpec(rope.theta, rope.scale, shape.rope_dim, rope.scaling)


def projection_weights(
    part: LatentAttention, config: DecoderConfig, ours: str, theirs: str
) -> Weights:
    """Yield the name and the source of every weight of `LatentProjections`."""
    shape, heads, hidden = part.shape, part.num_heads, config.hidden_size
    paired = shape.rope_dim if shape.is_interleaved else 0
    name, width = "q_proj", hidden
    if shape.q_rank is not None:
        name, width = "q_b_proj", shape.q_rank
        down = [Output("q_a_proj", shape.q_rank)]
        yield from rows(f"{ours}.q_down", theirs, down, hidden, bias=part.down_bias)
        yield vector(f"{ours}.q_norm", f"{theirs}.q_a_layernorm.weight", shape.q_rank)
    nope = Output(name, heads * shape.nope_dim, 0, shape.qk_dim, heads)
    rotated = Output(
        name, heads * shape.rope_dim, shape.nope_dim, shape.qk_dim, heads, paired=paired
    )
    yield from rows(f"{ours}.q_nope", theirs, [nope], width)
    yield from rows(f"{ours}.q_rope", theirs, [rotated], width)
    name = "kv_a_proj_with_mqa"
    down = [
        Output(name, shape.rank, 0, shape.width),
        Output(name, shape.rope_dim, shape.rank, shape.width, paired=paired),
    ]
    yield from rows(f"{ours}.kv_down", theirs, down, hidden, bias=part.down_bias)
    yield vector(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm.weight", shape.rank)
    yield f"{ours}.v_up.weight", _of_heads(part, theirs, shape.nope_dim, shape.v_dim)
    absorbed = _of_heads(part, theirs, 0, shape.nope_dim, as_columns=True)
    yield f"{ours}.q_absorb.weight", absorbed
    out = f"{ours}.o_proj", f"{theirs}.o_proj"
    yield from columns(*out, (hidden, heads * shape.v_dim), bias=part.o_bias)


def _of_heads(
    part: LatentAttention, theirs: str, begin: int, count: int, *, as_columns: bool = False
) -> Weight:
    """Return a matrix for each head: some rows of what K and V of the head are projected with."""
    shape, heads = part.shape, part.num_heads
    of_head = shape.nope_dim + shape.v_dim
    whole = (heads * of_head, shape.rank)
    starts = (head * of_head + begin for head in range(heads))
    parts = tuple(
        Part(f"{theirs}.kv_b_proj.weight", whole, (start, start + count), as_columns=as_columns)
        for start in starts
    )
    return Weight(parts, True, heads=heads)
