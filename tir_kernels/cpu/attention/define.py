# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel for CPUs is checked for before it is built."""

from __future__ import annotations

from collections.abc import Callable

from ...spec import KernelSpec
from ..conversion import require_half_conversion


def build(
    spec: KernelSpec, signature: Callable, attend: Callable, *, has_pages: bool = True, **options
):
    """Build an attention kernel.

    Parameters
    ----------
    spec : KernelSpec
    signature : callable
        The kernel's function in `signatures`.
    attend : callable
        Emits the body for the typed inputs.
    has_pages : bool
        Whether it reads pages, which are of `spec.kv_dtype`.
    options
        Of the signature.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, *([spec.kv_dtype] if has_pages else []))
    return signature(spec, attend, **options)
