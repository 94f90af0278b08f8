# SPDX-License-Identifier: Apache-2.0
"""`RecurrentConfig` and `ConvConfig`: what a layer keeps of a sequence in place of K and V."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import check_choice, check_int

# tir_kernels.recurrent_spec has the same names: a configuration must not import TVM for them.
RECURRENT_RULES = ("gated_delta", "kda", "mamba2", "lightning")
CONV_ACTIVATIONS = ("silu",)


@dataclass(frozen=True)
class RecurrentConfig:
    """The state of a recurrent layer: a float32 matrix ``[key_dim, value_dim]`` for each head.

    A token with query q, key k, value v and log decay g makes the state S of a head
    ``exp(g) * S + k (x) u`` and reads ``scale * S^T q``.

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
        Number of tokens after which the cache keeps another checkpoint of the states. None: as many
        as need the bytes of one state.

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

    def __post_init__(self) -> None:
        check_choice("recurrent.rule", self.rule, RECURRENT_RULES)
        for name in ("num_heads", "num_key_heads", "key_dim", "value_dim"):
            check_int(f"recurrent.{name}", getattr(self, name), 1, 4096)
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"recurrent.num_heads ({self.num_heads}) must be a multiple of "
                f"recurrent.num_key_heads ({self.num_key_heads})"
            )
        if self.checkpoint_tokens is not None:
            check_int("recurrent.checkpoint_tokens", self.checkpoint_tokens)

    @property
    def has_channel_decay(self) -> bool:
        """Whether the log decay has a value for each key channel, not one for a head."""
        return self.rule == "kda"

    @property
    def has_beta(self) -> bool:
        """Whether the rule is a delta rule, whose tokens have a beta for each head."""
        return self.rule in ("gated_delta", "kda")


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
        Number of rows that an output depends on, at least 2. The cache keeps ``width - 1`` of them.
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
        check_int("conv.channels", self.channels)
        check_int("conv.width", self.width, 2)
        if self.activation is not None:
            check_choice("conv.activation", self.activation, CONV_ACTIVATIONS)
        if not isinstance(self.has_bias, bool):
            raise TypeError(f"conv.has_bias must be a bool, got {self.has_bias!r}")
