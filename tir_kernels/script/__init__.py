# SPDX-License-Identifier: Apache-2.0
"""The decorators of TVMScript, `prim_func` and `inline`, with a reader that is fast.

Kernels are TVMScript that `tvm.script` can parse; a test compares its result with that of this
module. TVM's parser compiles every subexpression by itself and searches the call stack at every
inline function, which takes longer than all else that a kernel's TIR needs. This module
rewrites the source of a function once, so that Python runs it: loops, branches, assignments and
expressions in statement position call the functions below, and the rest stays as it is written.

Errors are Python tracebacks into the source of the kernel.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser.core import entry
from tvm.tirx.script import builder

from .rewriter import definition_of, rewritten
from .statements import current, is_reading, opened, reading

__all__ = ["inline", "name_value", "opened", "prim_func", "read_by_tvm"]

_parser = threading.local()  # `is_tvm`: whether TVM's own parser reads kernels


def prim_func(
    function: Callable | None = None, *, absent: Collection[str] = (), arguments: Any = None
):
    """Read a kernel: the decorator ``@T.prim_func(private=True)``.

    Parameters
    ----------
    function : callable
        In TVMScript. Its module must not import `annotations` from `__future__`.
    absent : collection of str
        Parameters that this kernel does without. They are None in its body, so one source serves
        kernels that differ by an argument.
    arguments : signatures.signature.KernelArguments, optional
        The parameters of the kernel. The function has one parameter then, for which it gets what
        ``arguments.match`` makes of them.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.

    Raises
    ------
    TypeError
        If annotations are text.
    """
    if function is None:
        return functools.partial(prim_func, absent=absent, arguments=arguments)
    if getattr(_parser, "is_tvm", False):
        return _parse_with_tvm(function, absent, arguments)
    annotations = (
        {name: getattr(T, dtype) for name, dtype in arguments.dtypes.items()}
        if arguments
        else function.__annotations__
    )
    if any(isinstance(annotation, str) for annotation in annotations.values()):
        raise TypeError(
            f"the annotations of {function.__name__} are text: its module must not import "
            "annotations from __future__"
        )
    with IRBuilder() as made:
        with builder.prim_func(is_private=True), reading() as kernel:
            builder.func_name(function.__name__)
            parameters = {
                name: None if name in absent else builder.arg(name, annotation())
                for name, annotation in annotations.items()
            }
            kernel.named.update(p for p in parameters.values() if p is not None)
            if arguments:
                rewritten(function)(arguments.match(**parameters))
            else:
                rewritten(function)(**parameters)
    return made.get()


def name_value(name: str, value):
    """Name a buffer or a variable that Python code has made for a kernel, and return it."""
    if is_reading():
        return current().name(name, value)
    IRBuilder.name(name, value)
    return value


def inline(function: Callable) -> Callable:
    """Mark a function in TVMScript that is read anew at every call: the decorator ``@T.inline``."""
    by_us = by_tvm = None

    @functools.wraps(function)
    def call(*args, **kwargs) -> None:
        nonlocal by_us, by_tvm
        if is_reading():
            by_us = by_us or rewritten(function)
            by_us(*args, **kwargs)
        else:
            by_tvm = by_tvm or T.inline(function)
            by_tvm(*args, **kwargs)

    return call


prim_func.dispatch_token = T.prim_func.dispatch_token  # TVM's parser knows its decorators by these
inline.dispatch_token = T.inline.dispatch_token


@contextmanager
def read_by_tvm() -> Iterator[None]:
    """Leave kernels to TVM's own parser meanwhile, to compare the results."""
    _parser.is_tvm = True
    try:
        yield
    finally:
        _parser.is_tvm = False


def _parse_with_tvm(function: Callable, absent: Collection[str], arguments: Any):
    definition = definition_of(function)
    if arguments:
        _spell_out(definition, arguments)
    definition.args.args = [a for a in definition.args.args if a.arg not in absent]
    definition.decorator_list = [ast.parse("T.prim_func(private=True)", mode="eval").body]
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names.update(dict.fromkeys(absent), T=T, __arguments__=arguments)
    source = ast.unparse(definition)
    # TVM's parser calls source that is a text so, and looks there for inline functions in it.
    linecache.cache["<str>"] = (len(source), None, source.splitlines(keepends=True), "<str>")
    parsed = entry.parse(source, names, check_well_formed=False)
    return parsed.without_attr("global_symbol")


def _spell_out(definition: ast.FunctionDef, arguments: Any) -> None:
    """Give a function the parameters of a kernel, and a first statement that matches them."""
    (matched,) = definition.args.args
    # The body may have variables of the arguments' names, which TVM's parser would refuse.
    passed = ", ".join(f"{name}=_{name}" for name in arguments.dtypes)
    definition.args.args = [
        ast.arg(f"_{name}", ast.parse(f"T.{dtype}", mode="eval").body)
        for name, dtype in arguments.dtypes.items()
    ]
    match = f"{matched.arg} = T.meta_var(__arguments__.match({passed}))"
    definition.body[:0] = ast.parse(match).body
