# SPDX-License-Identifier: Apache-2.0
"""From the source of a kernel to the function that Python runs.

Statements and operators get the meaning that TVMScript gives them.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable

from . import statements

_REWRITTEN = "__rewritten__"  # the function in rewritten source
STATEMENTS = "__statements__"  # the module `statements`, in rewritten source


def _call(function: Callable, *arguments: ast.expr) -> ast.Call:
    """Return the call of a function of `statements`."""
    name = ast.Attribute(ast.Name(STATEMENTS, ast.Load()), function.__name__, ast.Load())
    return ast.Call(name, list(arguments), [])


def _later(value: ast.expr) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


class Rewriter(ast.NodeTransformer):
    """Gives statements and operators the meaning that TVMScript gives them.

    Lambdas and comprehensions are Python, as they are for TVM.
    """

    def rewrite(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        definition.decorator_list, definition.returns = [], None
        for argument in definition.args.args:
            argument.annotation = None
        definition.body = self._body(definition.body)
        return definition

    def _body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made = []
        for statement in statements:
            new = self.visit(statement)
            for node in new if isinstance(new, list) else [new]:
                made.append(ast.copy_location(node, statement))
        return made

    visit_FunctionDef = rewrite

    def visit_Lambda(self, node):
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_Lambda

    def visit_For(self, node):
        frame = node.iter
        if isinstance(frame, ast.Call) and getattr(frame.func, "id", None) == "range":
            frame = ast.Call(ast.parse("T.serial", mode="eval").body, frame.args, frame.keywords)
            if len(frame.args) == 1:
                frame.args = [ast.Constant(0), *frame.args]
        names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
        node.iter = _call(statements.loop, self.visit(frame), ast.Constant(tuple(names)))
        node.body = self._body(node.body)
        return node

    def visit_While(self, node):
        once = ast.Name("_", ast.Store())
        iterator = _call(statements.repeat, self.visit(node.test))
        return ast.For(once, iterator, self._body(node.body), [])

    def visit_If(self, node):
        test, body, otherwise = self.visit(node.test), self._body(node.body), []
        if node.orelse:
            otherwise = self._body(node.orelse)
            body = [ast.If(ast.Name("_taken", ast.Load()), body, otherwise)]
        branch = ast.Name("_taken", ast.Store())
        return ast.For(
            branch, _call(statements.branches, test, ast.Constant(bool(otherwise))), body, []
        )

    def visit_With(self, node):
        names = []
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            if item.optional_vars is not None:
                names += [n for n in ast.walk(item.optional_vars) if isinstance(n, ast.Name)]
        named = [
            ast.Expr(
                _call(statements.name_variable, ast.Constant(n.id), ast.Name(n.id, ast.Load()))
            )
            for n in names
        ]
        node.body = named + self._body(node.body)
        node.items.append(ast.withitem(_call(statements.block)))
        return node

    def visit_Assign(self, node):
        (target,) = node.targets
        value = self.visit(node.value)
        if isinstance(target, ast.Subscript):
            return ast.Expr(self._store(target, value))
        if isinstance(target, ast.Name):
            return self._bind(target.id, value)
        if isinstance(target, ast.Attribute):
            return self._set(target, value)
        names = [name.id for name in target.elts]
        items = [f"{name}_item" for name in names]
        unpacked = ast.Tuple([ast.Name(item, ast.Store()) for item in items], ast.Store())
        bound = [
            self._bind(name, ast.Name(item, ast.Load()), statements.unpack)
            for name, item in zip(names, items, strict=True)
        ]
        return [ast.Assign([unpacked], value), *bound]

    def visit_AugAssign(self, node):
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        value = ast.BinOp(self.visit(old), node.op, self.visit(node.value))
        if isinstance(node.target, ast.Subscript):
            return ast.Expr(self._store(node.target, value))
        if isinstance(node.target, ast.Attribute):
            return self._set(node.target, value)
        return self._bind(node.target.id, value)

    def visit_AnnAssign(self, node):
        name = node.target.id
        value = ast.Constant(None) if node.value is None else self.visit(node.value)
        made = _call(statements.declare, ast.Constant(name), self.visit(node.annotation), value)
        return ast.Assign([ast.Name(name, ast.Store())], made)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return ast.Pass()  # a docstring
        return ast.Expr(_call(statements.statement, self.visit(node.value)))

    def visit_Assert(self, node):
        return ast.Expr(_call(statements.check, self.visit(node.test), self.visit(node.msg)))

    def visit_Break(self, node):
        return ast.Expr(_call(statements.leave_loop))

    def visit_Continue(self, node):
        return ast.Expr(_call(statements.next_turn))

    def visit_Return(self, node):
        raise SyntaxError(f"line {node.lineno}: kernels and inline functions return nothing")

    def _store(self, target: ast.Subscript, value: ast.expr) -> ast.Call:
        return _call(statements.store, self.visit(target.value), value, self.visit(target.slice))

    def _set(self, target: ast.Attribute, value: ast.expr) -> ast.Expr:
        owner, name = self.visit(target.value), ast.Constant(target.attr)
        return ast.Expr(_call(statements.set_attribute, owner, name, value))

    def _bind(self, name: str, value: ast.expr, bind=statements.assign) -> ast.Assign:
        before = _later(ast.Name(name, ast.Load()))
        bound = _call(bind, ast.Constant(name), value, before)
        return ast.Assign([ast.Name(name, ast.Store())], bound)

    def visit_BoolOp(self, node):
        result = self.visit(node.values[0])
        function = statements.both if isinstance(node.op, ast.And) else statements.either
        for value in node.values[1:]:
            result = _call(function, result, _later(self.visit(value)))
        return result

    def visit_UnaryOp(self, node):
        node.operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return _call(statements.negate, node.operand)
        return node

    def visit_Compare(self, node):
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        pairs = [
            _call(statements.compare, ast.Constant(type(op).__name__), left, right)
            for op, left, right in zip(node.ops, values, values[1:], strict=False)
        ]
        result = pairs[0]
        for pair in pairs[1:]:
            result = _call(statements.both, result, _later(pair))
        return result

    def visit_IfExp(self, node):
        branches_ = (_later(self.visit(value)) for value in (node.body, node.orelse))
        return _call(statements.choose, self.visit(node.test), *branches_)


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
