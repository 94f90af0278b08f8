# SPDX-License-Identifier: Apache-2.0
"""From the names of arguments and a function that emits the body to an attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from tvm.script import tirx as T

from ...define import define_kernel
from ...signatures import SCALAR_TYPES, match
from ...spec import KernelSpec
from ..elements import ACCESS_BYTES


def attention_kernel(
    spec: KernelSpec, names: Sequence[str], emit: Callable[[SimpleNamespace], None]
):
    """Build an attention kernel.

    Parameters
    ----------
    spec : KernelSpec
    names : sequence of str
        Its arguments in order.
    emit : callable
        Emits the body; gets what `signatures.match` returns.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """

    def body(*given):
        emit(match(spec, dict(zip(names, given, strict=True)), ACCESS_BYTES))

    return define_kernel({name: SCALAR_TYPES.get(name, T.handle) for name in names}, body)
