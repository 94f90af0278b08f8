# SPDX-License-Identifier: Apache-2.0
"""From the source of a kernel to the function that Python runs."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Callable

from . import statements
from .rewriter import STATEMENTS, Rewriter

_REWRITTEN = "__rewritten__"  # the function in rewritten source


def definition_of(function: Callable) -> ast.FunctionDef:
    """Parse the source of a function; lines and columns are those of its file."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first = code.co_firstlineno
    source = "".join(lines[first - 1 : _last_lines("".join(lines))[first]])
    shift = first - 1
    if source[0].isspace():  # it is nested
        source, shift = "if True:\n" + source, shift - 1
    tree = ast.parse(source)
    ast.increment_lineno(tree, shift)
    definition = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    return definition


@functools.lru_cache(maxsize=64)
def _last_lines(source: str) -> dict[int, int]:
    """First line -> last line of the functions of a file; `inspect.getsource` would take longer."""
    return {
        min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno): node.end_lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }


_codes: dict[types.CodeType, types.CodeType] = {}


def rewritten(function: Callable) -> Callable:
    original = function.__code__
    if original not in _codes:
        _codes[original] = _rewritten_code(function)
    code = _codes[original]
    cells = dict(zip(original.co_freevars, function.__closure__ or (), strict=True))
    cells[STATEMENTS] = types.CellType(statements)
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _rewritten_code(function: Callable) -> types.CodeType:
    definition = Rewriter().rewrite(definition_of(function))
    definition.name = _REWRITTEN  # a method may be named as a function that it calls
    names = [*function.__code__.co_freevars, STATEMENTS]
    outer = ast.parse(f"def outer({', '.join(names)}): pass").body[0]
    outer.body = [definition]
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    code = compile(module, inspect.getsourcefile(function) or "<kernel>", "exec")
    code = _constant(_constant(code, "outer"), _REWRITTEN)
    return code.replace(co_name=function.__name__, co_qualname=function.__qualname__)


def _constant(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        constant
        for constant in code.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == name
    )
