# SPDX-License-Identifier: Apache-2.0
"""The specs of the kernels of recurrent layers and of short convolutions."""

from __future__ import annotations

from tvm.target import Target

from tir_kernels.conv_spec import ConvSpec
from tir_kernels.index_spec import IndexSpec
from tir_kernels.recurrent_spec import RecurrentSpec

from ..config import RecurrentConfig, ResolvedConfig, ResolvedLayer
from .targets import vector_target


def recurrent_spec(
    config: ResolvedConfig, recurrent: RecurrentConfig, target: Target
) -> RecurrentSpec:
    """Return the spec of the kernels of a recurrence."""
    return RecurrentSpec(
        rule=recurrent.rule,
        num_heads=recurrent.num_heads,
        num_key_heads=recurrent.num_key_heads,
        key_dim=recurrent.key_dim,
        value_dim=recurrent.value_dim,
        dtype=config.dtype,
        page_size=config.page_size,
        target=vector_target(target),
        state_dtype=recurrent.state_dtype,
    )


def conv_spec(config: ResolvedConfig, layer: ResolvedLayer, target: Target) -> ConvSpec | None:
    """Return the spec of the kernels of a layer's short convolution, if it has one."""
    conv = layer.conv
    if conv is None:
        return None
    return ConvSpec(
        channels=conv.channels,
        width=conv.width,
        dtype=config.dtype,
        activation=conv.activation,
        has_bias=conv.has_bias,
        page_size=config.page_size,
        target=vector_target(target),
    )


def index_spec(config: ResolvedConfig, layer: ResolvedLayer, target: Target) -> IndexSpec:
    """Return the spec of the kernels of an index lane."""
    assert layer.kv_dtype is not None
    return IndexSpec(
        num_heads=layer.num_qo_heads,
        dim=layer.qk_head_dim,
        dtype=config.dtype,
        kv_dtype=layer.kv_dtype,
        page_size=config.page_size,
        target=vector_target(target),
    )


def describe(spec: RecurrentSpec | ConvSpec | IndexSpec) -> str:
    """Return a few words about the kernels, for the log."""
    if isinstance(spec, IndexSpec):
        return f"{spec.num_heads} index heads of {spec.dim}, {spec.dtype}, keys {spec.kv_dtype}"
    if isinstance(spec, ConvSpec):
        return f"convolution of {spec.channels} channels, {spec.width} wide, {spec.dtype}"
    return (
        f"{spec.rule} with {spec.num_heads} states of {spec.key_dim} x {spec.value_dim}, "
        f"{spec.dtype}"
    )
