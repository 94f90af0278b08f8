# SPDX-License-Identifier: Apache-2.0
"""Checks of every attention kernel for CPUs before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...layout import view_pages
from ...signatures.inputs import AttentionInputs
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
        Emits the body for the typed inputs, whose pages are as `layout.view_pages` gives them.
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

    def attend_to_pages(a: AttentionInputs) -> None:
        attend(replace(a, pages=view_pages(a.pages, spec)) if has_pages else a)

    return signature(spec, attend_to_pages, **options)
