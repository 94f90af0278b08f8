# SPDX-License-Identifier: Apache-2.0
"""The call with which a model creates a cache of this package: `pagedkv.create_in_model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.target import Target
from tvm_ffi import Shape

from tir_kernels import build_kernel, kernel_names
from tir_kernels.catalogue import KERNELS
from tir_kernels.spec import KernelSpec

from ..compiler import (
    SpecSets,
    architecture,
    config_map,
    is_cuda,
    required_features,
    spec_sets,
)
from ..compiler.cuda import arch_of
from ..config import ResolvedConfig
from .creation_values import CreationValues
from .model_kernels import ModelKernels
from .releases import StringImm

# The Relax VM quotes the name of a function that it does not find: this one says what to do where
# the library is not loaded. runtime_ext/ffi/register.cc names it too.
CREATE_IN_MODEL = "pagedkv.create_in_model (import tvm_pagedkv, or load libtvm_pagedkv.so)"


def own_creation(
    config: ResolvedConfig, values: CreationValues, target: Target
) -> tuple[relax.Expr, ModelKernels]:
    """Return the call that creates a cache of this package, and the kernels that it refers to.

    Parameters
    ----------
    config : ResolvedConfig
        Its capacities are ignored.
    values : CreationValues
        What the model gives in their place.
    target : tvm.target.Target

    Raises
    ------
    ValueError
        If the target has no kernels for a layer.
    """
    sets = spec_sets(config, target, arch_of(target) if is_cuda(target) else None)
    kernels = ModelKernels(target, repr(sets.specs))
    described = config_map(config, sets, tvm.cpu())
    for field in fields(values):
        if field.name in described:  # factors only with longrope
            described[field.name] = getattr(values, field.name)
    compiled_for: dict[str, Any] = {"page_size": config.page_size}
    if not is_cuda(target):
        compiled_for["architecture"] = architecture(target)
        compiled_for["features"] = required_features(target)
    call = relax.call_pure_packed(
        CREATE_IN_MODEL,
        _expression(described),
        _expression(_kernel_maps(config, sets, kernels)),
        relax.op.zeros((), config.dtype),  # on the device of the cache
        _expression(compiled_for),
        ty_args=relax.AnyType(),
    )
    return call, kernels


def _kernel_maps(
    config: ResolvedConfig, sets: SpecSets, kernels: ModelKernels
) -> list[dict[str, relax.ExternFunc]]:
    """Return the kernels of each set by their names.

    Layers that differ in their window or rotation share the kernels that have nothing to do with
    it.
    """
    has_inline = any(layer.rope.mode == "inline" for layer in config.layers)
    rope = next((s.rope for s in sets.specs if isinstance(s, KernelSpec) and not s.is_latent), None)

    def function(name: str, spec: Any) -> relax.ExternFunc:
        if isinstance(spec, KernelSpec):
            spec = replace(spec, kind=spec.kind.removesuffix("_sliding"))
            kernel = KERNELS[name]
            rotates = kernel.rotates_new_rows or (has_inline and kernel.can_rotate_inside)
            if not spec.is_latent and not rotates:
                spec = replace(spec, rope=rope)
        return kernels.refer(name, repr(spec), partial(build_kernel, name, spec))

    return [{name: function(name, spec) for name in kernel_names(spec)} for spec in sets.specs]


def _expression(value: Any) -> relax.Expr:
    """Return the expression of a map, list, text, number, shape or tensor, or of one given as such.

    Fields of maps that are None are left out.
    """
    if isinstance(value, Mapping):
        pairs = [(StringImm(name), _expression(x)) for name, x in value.items() if x is not None]
        arguments = [each for pair in pairs for each in pair]
        return relax.call_pure_packed("ffi.Map", *arguments, ty_args=relax.AnyType())
    if isinstance(value, list):
        return relax.Tuple([_expression(x) for x in value])
    if isinstance(value, str):
        return StringImm(value)
    if isinstance(value, Shape):
        return relax.ShapeExpr([*value])
    if isinstance(value, tvm.runtime.Tensor):
        return relax.const(value)
    if isinstance(value, (int, float, tirx.Var)):
        return relax.prim_value(value)
    return value
