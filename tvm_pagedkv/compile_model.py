# SPDX-License-Identifier: Apache-2.0
"""`tvm.compile` for models with a cache: its kernels come from the disk and are linked in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from .cuda_build import is_cuda
from .cuda_objects import CudaKernelObjects
from .lowering import KernelObjects

KERNEL = "pagedkv.kernel"  # marks the functions that the front end adds to a model


def compile(
    module: tvm.IRModule, target: Target | str | Mapping | None = None, **options
) -> relax.VMExecutable:
    """Compile a model as ``tvm.compile`` does, in less time.

    The kernels of its caches are compiled, or found on the disk, and linked to the model; a library
    that is exported holds all it needs. For GPUs this is the only way to compile them: kernels are
    built by nvcc, for the target's architecture.

    Parameters
    ----------
    module : tvm.IRModule
        What ``export_tvm`` of a model with a `PagedKVCache` returns.
    target : optional
        As ``tvm.compile`` takes it; None: the current target.
    **options
        Of ``tvm.compile``.

    Raises
    ------
    ValueError
        For a GPU whose architecture has no kernels, or is not named.
    RuntimeError
        For a GPU without nvcc.
    """
    target = Target.current() if target is None else Target(target)
    kernels = {
        name.name_hint: function.without_attr(KERNEL)
        for name, function in module.functions_items()
        if function.attrs and KERNEL in function.attrs
    }
    if kernels and target is not None:
        kind = CudaKernelObjects if is_cuda(target) else KernelObjects
        module = _with_external(module, kind(kernels, target))
    return tvm.compile(module, target, **options)


def _with_external(
    module: tvm.IRModule, objects: KernelObjects | CudaKernelObjects
) -> tvm.IRModule:
    """The module with references to compiled kernels in place of their functions."""
    symbols_of = defaultdict(list)
    for symbol, path in objects.paths.items():
        symbols_of[path].append(symbol)
    linked = [
        tvm.runtime.load_static_library(str(path), symbols) for path, symbols in symbols_of.items()
    ]
    rest = {
        name: _Externalized(objects.paths).visit_expr(function)
        if isinstance(function, relax.Function)
        else function
        for name, function in module.functions_items()
        if name.name_hint not in objects.paths
    }
    attributes = dict(module.attrs or {})
    attributes["external_mods"] = [*attributes.get("external_mods", []), *linked]
    return tvm.IRModule(rest, attrs=attributes, global_infos=module.global_infos)


@mutator
class _Externalized(PyExprMutator):
    """Names the kernels instead of referring to functions of the module."""

    def __init__(self, symbols):
        super().__init__()
        self._symbols = symbols

    def visit_global_var_(self, variable):
        name = variable.name_hint
        return relax.ExternFunc(name) if name in self._symbols else variable
