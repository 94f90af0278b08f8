# SPDX-License-Identifier: Apache-2.0
"""`RecurrentConfig` and `ConvConfig`: what a layer keeps of a sequence in place of K and V."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import check_choice, check_int
from .dtypes import DTYPES, ITEMSIZE

# tir_kernels.recurrent_spec has the same names: a configuration must not import TVM for them.
RECURRENT_RULES = ("gated_delta", "kda", "mamba2", "lightning")
CONV_ACTIVATIONS = ("silu",)
MAX_CONV_WIDTH = 8

_MAX_CHECKPOINT_TOKENS = 1024
_STATES_OF_INGREDIENTS = 4  # between checkpoints, by default
_SECTION_BYTES = 16  # the parts of a row of ingredients begin at multiples of this


@dataclass(frozen=True)
class RecurrentConfig:
    """The state of a recurrent layer: a matrix ``[key_dim, value_dim]`` for each head.

    A token with query q, key k, value v and log decay g makes the state S of a head
    ``exp(g) * S + k (x) u`` and reads ``scale * S^T q``.

    The cache keeps the states behind every `checkpoint_tokens` positions, and what the recurrence
    takes of each token, its ingredients k, v, g and beta: the states at any position are computed
    from the nearest kept ones before it.

    Parameters
    ----------
    rule : {"gated_delta", "kda", "mamba2", "lightning"}
        "gated_delta" and "kda" are delta rules, with ``u = beta * (v - (exp(g) * S)^T k)``; "kda"
        has a log decay for each key channel. In "mamba2" and "lightning" u is v.
    num_heads : int
        Heads of v, each of which has a state.
    num_key_heads : int
        Heads of q and k; consecutive heads of v share one.
    key_dim, value_dim : int
        Widths of a row of q and k, and of v and the output.
    checkpoint_tokens : int, optional
        Number of tokens after which the cache keeps another checkpoint of the states: a power of
        two, and a multiple of the page size. None: as many as have ingredients of the size of four
        times the states.
    history_tokens : int, optional
        Tokens whose ingredients, and rows of a convolution, the cache keeps for forks, pops and
        prefix hits, beside those that running sequences need. Checkpoints are kept for all. None:
        `KVCacheConfig.max_total_tokens` tokens in all.
    state_dtype : {"float32", "float16", "bfloat16"}
        Type of the states. Those of a narrow type take half the memory and, in decode, about half
        the time. They are rounded after each token, so that they too have the same bits however
        their tokens came; `docs/recurrent-layers.md` shows the error.

    Raises
    ------
    ValueError, TypeError
        If no layer can have a value; the message names the field.
    """

    rule: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    checkpoint_tokens: int | None = None
    history_tokens: int | None = None
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("recurrent.rule", self.rule, RECURRENT_RULES)
        check_choice("recurrent.state_dtype", self.state_dtype, DTYPES)
        for name in ("num_heads", "num_key_heads", "key_dim", "value_dim"):
            check_int(f"recurrent.{name}", getattr(self, name), 1, 4096)
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"recurrent.num_heads ({self.num_heads}) must be a multiple of "
                f"recurrent.num_key_heads ({self.num_key_heads})"
            )
        if self.checkpoint_tokens is not None:
            check_int("recurrent.checkpoint_tokens", self.checkpoint_tokens)
            if self.checkpoint_tokens & (self.checkpoint_tokens - 1):
                raise ValueError(
                    "recurrent.checkpoint_tokens must be a power of two, got "
                    f"{self.checkpoint_tokens}"
                )
        if self.history_tokens is not None:
            check_int("recurrent.history_tokens", self.history_tokens, 0)

    @property
    def has_channel_decay(self) -> bool:
        """Whether the log decay has a value for each key channel, not one for a head."""
        return self.rule == "kda"

    @property
    def has_beta(self) -> bool:
        """Whether the rule is a delta rule, whose tokens have a beta for each head."""
        return self.rule in ("gated_delta", "kda")

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all heads at one position."""
        return ITEMSIZE[self.state_dtype] * self.num_heads * self.key_dim * self.value_dim

    def row_bytes(self, dtype: str) -> int:
        """Bytes of the ingredients of a token, whose k and v are of `dtype`."""
        sections = [
            self.num_key_heads * self.key_dim * ITEMSIZE[dtype],
            self.num_heads * self.value_dim * ITEMSIZE[dtype],
            self.num_heads * (self.key_dim if self.has_channel_decay else 1) * ITEMSIZE["float32"],
            self.num_heads * ITEMSIZE["float32"] if self.has_beta else 0,
        ]
        return sum(-(-size // _SECTION_BYTES) * _SECTION_BYTES for size in sections)

    def interval(self, dtype: str, page_size: int) -> int:
        """Return the number of tokens from one checkpoint to the next.

        Raises
        ------
        ValueError
            If `checkpoint_tokens` is no multiple of the page size.
        """
        if self.checkpoint_tokens is None:
            size = max(_STATES_OF_INGREDIENTS * self.state_bytes // self.row_bytes(dtype), 1)
            return max(min(1 << size.bit_length() - 1, _MAX_CHECKPOINT_TOKENS), page_size)
        if self.checkpoint_tokens % page_size:
            raise ValueError(
                f"recurrent.checkpoint_tokens ({self.checkpoint_tokens}) must be a multiple of "
                f"page_size ({page_size})"
            )
        return self.checkpoint_tokens


@dataclass(frozen=True)
class ConvConfig:
    """A causal convolution along the tokens, for each channel by itself.

    Row t of the output is ``activation(bias + sum(weight[:, i] * x[t - width + 1 + i]))`` for i
    from 0 to ``width - 1``; rows of x before the first token are zeros.

    Parameters
    ----------
    channels : int
        Width of a row of x and of the output.
    width : int
        Number of rows that an output depends on, from 2 to 8. The cache keeps them as it
        keeps K and V, for forks, pops and prefix hits at any token.
    activation : {"silu"}, optional
    has_bias : bool
        Whether the convolution has a bias for each channel.

    Raises
    ------
    ValueError, TypeError
        If no layer can have a value; the message names the field.
    """

    channels: int
    width: int
    activation: str | None = None
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_int("conv.channels", self.channels, 1, 2**24)
        check_int("conv.width", self.width, 2, MAX_CONV_WIDTH)
        if self.activation is not None:
            check_choice("conv.activation", self.activation, CONV_ACTIVATIONS)
        if not isinstance(self.has_bias, bool):
            raise TypeError(f"conv.has_bias must be a bool, got {self.has_bias!r}")
