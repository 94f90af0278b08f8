# SPDX-License-Identifier: Apache-2.0
"""From the names of arguments and a function that emits the body to an attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import prim_func

from ...signatures import SCALAR_TYPES, match
from ...spec import KernelSpec
from ..conversion import require_half_conversion


def attention_kernel(
    spec: KernelSpec, names: Sequence[str], emit: Callable[[SimpleNamespace], None]
):
    """Build an attention kernel: what the builder of each, ``spec -> PrimFunc``, does and raises.

    Parameters
    ----------
    spec : KernelSpec
    names : sequence of str
        Its arguments in order.
    emit : callable
        Emits the body; gets what `match` returns.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, *([spec.kv_dtype] if "pages" in names else []))
    with IRBuilder() as builder:
        with prim_func(is_private=True, s_tir=True):
            T.func_name("attention")
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            types = [SCALAR_TYPES.get(name, T.handle) for name in names]
            given = {n: T.arg(n, make()) for n, make in zip(names, types, strict=True)}
            emit(match(spec, given))
    kernel = builder.get()
    tirx.analysis.verify_well_formed(kernel)
    return kernel
