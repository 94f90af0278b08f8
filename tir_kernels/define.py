# SPDX-License-Identifier: Apache-2.0
"""From Python callables that emit TIR to the function of a kernel."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import prim_func

_BEGINS_EARLY = "tirx.use_programtic_dependent_launch"  # the name has a letter less than it should


def define_kernel(arguments: dict[str, Callable], body: Callable, *, on_cpu: bool = False):
    """Define a kernel, or what launches it.

    Parameters
    ----------
    arguments : dict
        Name -> type, such as ``T.handle`` or ``T.int32``, in order.
    body : callable
        Emits the body; takes the arguments.
    on_cpu : bool
        It runs where it is called.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """
    with IRBuilder() as builder:
        with prim_func(is_private=True, s_tir=on_cpu):
            T.func_name("kernel")
            if on_cpu:
                T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            else:  # blocks may begin before the kernel before has ended: `launch` lets them wait
                T.func_attr({"tirx.kernel_launch_params": [_BEGINS_EARLY]})
            body(*[T.arg(name, make()) for name, make in arguments.items()])
    return builder.get()
