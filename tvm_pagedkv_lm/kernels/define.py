# SPDX-License-Identifier: Apache-2.0
"""How the kernels of a decoder are defined: built once, with arguments of rows and of weights."""

import functools
from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import require_half_target
from tir_kernels.cpu.isa.vector_rows import PARALLEL_IF
from tir_kernels.define import target_attributes
from tir_kernels.spec import STORED_ITEMSIZE, GpuTarget, VectorTarget
from tvm_pagedkv.compiler import for_relax

Target = VectorTarget | GpuTarget


def built_once(build: Callable[..., tirx.PrimFunc]) -> Callable[..., tirx.PrimFunc]:
    """Decorate the builder of a kernel: layers of one shape share it.

    Building the TIR of products takes up to a quarter of a second.
    """

    @functools.lru_cache(maxsize=256)
    @functools.wraps(build)
    def build_for_relax(*args, **kwargs) -> tirx.PrimFunc:
        kernel = build(*args, **kwargs)
        return for_relax(kernel) if "s_tir" in kernel.attrs else kernel

    return build_for_relax


def attributes(target: Target) -> dict:
    """Return the attributes of a kernel's function."""
    return target_attributes(on_cpu=isinstance(target, VectorTarget))


def matcher(target: Target, dtype: str) -> Callable:
    """Return ``(handle, *shape) -> Buffer`` for arguments of a type; None where there is none.

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    if isinstance(target, VectorTarget):
        require_half_target(target, [dtype], f"arguments of {dtype}")

    def match(handle, *shape):
        if handle is None:
            return T.meta_var(None)
        return T.match_buffer(handle, shape, dtype, align=STORED_ITEMSIZE.get(dtype, 4))

    return match


def match_float32(handle, *shape):
    """Match a float32 argument; None where there is none."""
    return T.meta_var(None) if handle is None else T.match_buffer(handle, shape, align=4)


def match_int32(handle, *shape):
    """Match an int32 argument; None where there is none."""
    if handle is None:
        return T.meta_var(None)
    return T.match_buffer(handle, shape, "int32", align=4)


def parallel_if(condition, count):
    """Loop over items that do not depend on each other, in parallel if a condition holds."""
    return T.parallel(count, annotations={PARALLEL_IF: condition})


def unused(**chosen: object) -> set[str]:
    """Return the parameters of a kernel, ``var_<name>``, that were not chosen."""
    return {f"var_{name}" for name, is_chosen in chosen.items() if not is_chosen}
