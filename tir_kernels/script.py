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
import copy
import functools
import inspect
import linecache
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.script.ir_builder.base import IRBuilderFrame
from tvm.script.parser._core import doc
from tvm.script.parser.core import entry
from tvm.script.parser.core.evaluator import _eval_op as evaluate_operator
from tvm.tirx.buffer import is_buffer_var
from tvm.tirx.script import builder
from tvm.tirx.script.builder.ir import name_meta_class_value, scalar_wrapper

_THIS = "__script__"  # this module, in rewritten source
_REWRITTEN = "__rewritten__"  # the function there
# `depth`: readers at work; `known`: variables that have a name; `scope`: numbers that were declared
# in the block that is read; `ended`: those of blocks that have ended.
_state = threading.local()


def prim_func(function: Callable | None = None, *, absent: Collection[str] = ()):
    """Read a kernel: the decorator ``@T.prim_func(private=True)``.

    Parameters
    ----------
    function : callable
        In TVMScript. Its module must not import `annotations` from `__future__`.
    absent : collection of str
        Parameters that this kernel does without. They are None in its body, so one source serves
        kernels that differ by an argument.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """
    if function is None:
        return functools.partial(prim_func, absent=absent)
    if getattr(_state, "uses_tvm", False):
        return _parse_with_tvm(function, absent)
    with IRBuilder() as made:
        with builder.prim_func(is_private=True), _reading():
            builder.func_name(function.__name__)
            arguments = {
                name: None if name in absent else _known(builder.arg(name, annotation()))
                for name, annotation in function.__annotations__.items()
            }
            _rewritten(function)(**arguments)
    return made.get()


def inline(function: Callable) -> Callable:
    """Mark a function in TVMScript that is read anew at every call: the decorator ``@T.inline``."""
    rewritten = with_tvm = None

    @functools.wraps(function)
    def call(*args, **kwargs) -> None:
        nonlocal rewritten, with_tvm
        if getattr(_state, "depth", 0):
            rewritten = rewritten or _rewritten(function)
            rewritten(*args, **kwargs)
        else:
            with_tvm = with_tvm or T.inline(function)
            with_tvm(*args, **kwargs)

    return call


prim_func.dispatch_token = T.prim_func.dispatch_token  # TVM's parser knows its decorators by these
inline.dispatch_token = T.inline.dispatch_token


@contextmanager
def read_by_tvm() -> Iterator[None]:
    """Leave kernels to TVM's own parser meanwhile, to compare the results."""
    _state.uses_tvm = True
    try:
        yield
    finally:
        _state.uses_tvm = False


def _parse_with_tvm(function: Callable, absent: Collection[str]):
    definition = _definition(function)
    definition.args.args = [a for a in definition.args.args if a.arg not in absent]
    definition.decorator_list = [ast.parse("T.prim_func(private=True)", mode="eval").body]
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names.update(dict.fromkeys(absent), T=T)
    source = ast.unparse(definition)
    # TVM's parser calls source that is a text so, and looks there for inline functions in it.
    linecache.cache["<str>"] = (len(source), None, source.splitlines(keepends=True), "<str>")
    parsed = entry.parse(source, names, check_well_formed=False)
    return parsed.without_attr("global_symbol")


@contextmanager
def _reading() -> Iterator[None]:
    before, record = dict(_state.__dict__), builder.ir._record_meta_resource
    _state.depth = before.get("depth", 0) + 1
    _state.known, _state.scope, _state.ended = set(), [], set()
    builder.ir._record_meta_resource = _record_resource
    try:
        yield
    finally:
        builder.ir._record_meta_resource = record
        _state.__dict__.clear()
        _state.__dict__.update(before)


def _record_resource(resource, skip_frames: int = 2) -> None:
    """Do what TVM does for each buffer that a component makes, without looking at all callers.

    TVM reads the source of every function on the stack, for an error that names the line. That
    takes a third of the time to read a kernel.
    """
    scope = builder.ir._current_meta_construction_scope()
    if scope is None:
        return
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename == builder.ir.__file__:
        frame = frame.f_back
    filename, line = frame.f_code.co_filename, frame.f_lineno
    code = [linecache.getline(filename, line)]
    scope.record(resource, inspect.Traceback(filename, line, frame.f_code.co_name, code, 0))


# ---- From source to the function that Python runs -----------------------------------------------


def _definition(function: Callable) -> ast.FunctionDef:
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


def _rewritten(function: Callable) -> Callable:
    original = function.__code__
    if original not in _codes:
        _codes[original] = _rewritten_code(function)
    code = _codes[original]
    cells = dict(zip(original.co_freevars, function.__closure__ or (), strict=True))
    cells[_THIS] = types.CellType(sys.modules[__name__])
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _rewritten_code(function: Callable) -> types.CodeType:
    definition = _Rewriter().rewrite(_definition(function))
    definition.name = _REWRITTEN  # a method may be named as a function that it calls
    names = [*function.__code__.co_freevars, _THIS]
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


def _this(function: Callable, *arguments: ast.expr) -> ast.Call:
    """Return the call of a function of this module."""
    name = ast.Attribute(ast.Name(_THIS, ast.Load()), function.__name__, ast.Load())
    return ast.Call(name, list(arguments), [])


def _later(value: ast.expr) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


class _Rewriter(ast.NodeTransformer):
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
        node.iter = _this(loop, self.visit(frame), ast.Constant(tuple(names)))
        node.body = self._body(node.body)
        return node

    def visit_While(self, node):
        once = ast.Name("_", ast.Store())
        iterator = _this(repeat, self.visit(node.test))
        return ast.For(once, iterator, self._body(node.body), [])

    def visit_If(self, node):
        test, body, otherwise = self.visit(node.test), self._body(node.body), []
        if node.orelse:
            otherwise = self._body(node.orelse)
            body = [ast.If(ast.Name("_taken", ast.Load()), body, otherwise)]
        branch = ast.Name("_taken", ast.Store())
        return ast.For(branch, _this(branches, test, ast.Constant(bool(otherwise))), body, [])

    def visit_With(self, node):
        names = []
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            if item.optional_vars is not None:
                names += [n for n in ast.walk(item.optional_vars) if isinstance(n, ast.Name)]
        named = [
            ast.Expr(_this(name_variable, ast.Constant(n.id), ast.Name(n.id, ast.Load())))
            for n in names
        ]
        node.body = named + self._body(node.body)
        node.items.append(ast.withitem(_this(scope)))
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
            self._bind(name, ast.Name(item, ast.Load()))
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
        made = _this(declare, ast.Constant(name), self.visit(node.annotation), value)
        return ast.Assign([ast.Name(name, ast.Store())], made)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return ast.Pass()  # a docstring
        return ast.Expr(_this(statement, self.visit(node.value)))

    def visit_Assert(self, node):
        return ast.Expr(_this(check, self.visit(node.test), self.visit(node.msg)))

    def visit_Break(self, node):
        return ast.Expr(_this(leave_loop))

    def visit_Continue(self, node):
        return ast.Expr(_this(next_turn))

    def visit_Return(self, node):
        raise SyntaxError(f"line {node.lineno}: kernels and inline functions return nothing")

    def _store(self, target: ast.Subscript, value: ast.expr) -> ast.Call:
        return _this(store, self.visit(target.value), value, self.visit(target.slice))

    def _set(self, target: ast.Attribute, value: ast.expr) -> ast.Expr:
        owner, name = self.visit(target.value), ast.Constant(target.attr)
        return ast.Expr(_this(set_attribute, owner, name, value))

    def _bind(self, name: str, value: ast.expr) -> ast.Assign:
        before = _later(ast.Name(name, ast.Load()))
        bound = _this(assign, ast.Constant(name), value, before)
        return ast.Assign([ast.Name(name, ast.Store())], bound)

    def visit_BoolOp(self, node):
        result = self.visit(node.values[0])
        function = both if isinstance(node.op, ast.And) else either
        for value in node.values[1:]:
            result = _this(function, result, _later(self.visit(value)))
        return result

    def visit_UnaryOp(self, node):
        node.operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return _this(negate, node.operand)
        return node

    def visit_Compare(self, node):
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        pairs = [
            _this(compare, ast.Constant(type(op).__name__), left, right)
            for op, left, right in zip(node.ops, values, values[1:], strict=False)
        ]
        result = pairs[0]
        for pair in pairs[1:]:
            result = _this(both, result, _later(pair))
        return result

    def visit_IfExp(self, node):
        branches_ = (_later(self.visit(value)) for value in (node.body, node.orelse))
        return _this(choose, self.visit(node.test), *branches_)


# ---- What rewritten functions call ---------------------------------------------------------------


def _known(variable: Var) -> Var:
    _state.known.add(variable)
    return variable


@contextmanager
def scope() -> Iterator[None]:
    """Let the numbers that are declared within end there, though Python keeps their names."""
    outer, _state.scope = _state.scope, []
    try:
        yield
    finally:
        _state.ended.update(_state.scope)
        _state.scope = outer


def name_variable(name: str, value) -> None:
    """Name what a frame has made."""
    if isinstance(value, Var):
        IRBuilder.name(name, _known(value))


def loop(frame, names: tuple[str, ...]) -> Iterator:
    """Yield the variables of a loop, once, within it."""
    if not isinstance(frame, builder.frame.ForFrame):
        raise TypeError(f"a loop goes over range, T.serial, T.unroll and the like; got {frame!r}")
    with frame as variables:
        many = isinstance(variables, (list, tuple, tvm.ir.Array))
        for name, variable in zip(names, variables if many else [variables], strict=True):
            name_variable(name, variable)
        with scope():
            yield variables


def repeat(condition) -> Iterator[None]:
    """Open a while loop."""
    with builder.While(condition), scope():
        yield


def branches(condition, has_else: bool) -> Iterator[bool]:
    """Open the branches of an if, one after the other; of a Python bool only the one taken."""
    if isinstance(condition, bool):
        if condition or has_else:
            yield condition
        return
    with builder.If(condition):
        with builder.Then(), scope():
            yield True
        if has_else:
            with builder.Else(), scope():
                yield False


def _scalar_buffer(value):
    """Return the buffer of one number that a name stands for, or None."""
    if isinstance(value, scalar_wrapper):
        value = value.scalar
    found = value.source if isinstance(value, TensorLoad) else value
    if is_buffer_var(found) and len(found.ty.shape) == 1 and bool(found.ty.shape[0] == 1):
        return found
    return None


def assign(name: str, value, before: Callable):
    """Bind a name, or store to the number that it stands for."""
    try:
        old = before()
    except NameError:
        old = None
    target = None if old is None else _scalar_buffer(old)
    if target is not None and target not in _state.ended:
        try:
            builder.buffer_store(target, value, [0])
            return old
        except TypeError:
            pass
    return _bind(name, value)


def _declare_scalar(name: str, scalar):
    """Name a number of the block that is read."""
    IRBuilder.name(name, scalar.source)
    _state.scope.append(scalar.source)
    return scalar


def _bind(name: str, value):
    if isinstance(value, scalar_wrapper):
        return _declare_scalar(name, value.scalar)
    if isinstance(value, I.meta_var):
        return value.value
    if getattr(type(value), "_is_meta_class", False):
        name_meta_class_value(name, value)
        return value
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _bind(f"{name}_{i}", item)
        return value
    if isinstance(value, tvm.ir.TensorRegion):
        return value
    if isinstance(value, IRBuilderFrame):
        value.add_callback(functools.partial(value.__exit__, None, None, None))
        entered = value.__enter__()
        IRBuilder.name(name, entered)
        return entered
    if is_buffer_var(value) or isinstance(value, (tirx.IterVar, tirx.Layout)):
        IRBuilder.name(name, value)
        return value
    if isinstance(value, Var) and value not in _state.known:
        name_variable(name, value)
        return value
    if not isinstance(value, tvm.ir.Expr):
        value = tirx.const(value)
    if isinstance(value, tvm.ir.StringImm) or not tvm.ir.is_prim_expr(value):
        variable = tirx.Var(name, value.ty)
        builder.Bind(value, var=variable)
        return _known(variable)
    scalar = _declare_scalar(name, builder.local_scalar(dtype=str(value.ty.dtype)).scalar)
    builder.buffer_store(scalar.source, value, [0])
    return scalar


def declare(name: str, annotation, value):
    """Bind a name that has an annotation: `T.let`, a dtype, or a dtype with a shape."""
    if isinstance(annotation, builder.LocalVectorAnnotation):
        return _bind(name, builder.alloc_local(shape=annotation.shape, dtype=annotation.dtype))
    if isinstance(annotation, builder.LetAnnotation):
        if not isinstance(value, tvm.ir.Expr):
            value = tirx.const(value)
        is_typed = annotation.type_spec is not None
        variable = annotation.as_var() if is_typed else annotation.as_var(rhs_dtype=value.ty)
        name_variable(name, variable)
        builder.Bind(value, var=variable)
        return variable
    scalar = _declare_scalar(name, builder.local_scalar(dtype=str(annotation().ty)).scalar)
    if value is not None:
        builder.buffer_store(scalar.source, value, [0])
    return scalar


def set_attribute(owner, name: str, value) -> None:
    """Store to a number that a component owns."""
    target = _scalar_buffer(getattr(owner, name))
    if target is None:
        raise TypeError(f"{name} of {type(owner).__name__} is no variable of a kernel")
    builder.buffer_store(target, value, [0])


def store(buffer, value, index) -> None:
    """Store an element of a buffer."""
    builder.buffer_store(buffer, value, index)


def statement(value) -> None:
    """Emit an expression in statement position."""
    if isinstance(value, IRBuilderFrame):
        value.add_callback(functools.partial(value.__exit__, None, None, None))
        value.__enter__()
    elif hasattr(value, "frames") and hasattr(value, "__enter__"):
        for frame in value.frames:
            statement(frame)
    elif value is None or isinstance(value, (str, Var)) or is_buffer_var(value):
        return
    elif isinstance(value, (int, bool)):
        builder.evaluate(tirx.const(value))
    elif isinstance(value, tirx.stmt.BufferStore):
        builder.buffer_store(value.buffer, value.value, value.indices)
    else:
        builder.evaluate(value)


def opened(context: AbstractContextManager):
    """Enter a context, which ends where what encloses it in the kernel ends."""
    anything = builder.attr(tirx.const(0), "scope", 1)  # the callback is of the frame around it
    anything.add_callback(lambda: context.__exit__(None, None, None))
    return context.__enter__()


def check(condition, message) -> None:
    """Emit an assertion: of a message, or of the kind of error and a message."""
    kind, text = message if isinstance(message, tuple) else ("RuntimeError", message)
    statement(builder.Assert(condition, text, error_kind=kind))


def leave_loop() -> None:
    """Emit a break."""
    builder.evaluate(builder.break_loop())


def next_turn() -> None:
    """Emit a continue."""
    builder.evaluate(builder.continue_loop())


def both(left, right: Callable):
    """``left and right``."""
    if isinstance(left, bool) and not left:
        return left
    return evaluate_operator(doc.And(), [left, right()])


def either(left, right: Callable):
    """``left or right``."""
    if isinstance(left, bool) and left:
        return left
    return evaluate_operator(doc.Or(), [left, right()])


def negate(value):
    """``not value``."""
    return evaluate_operator(doc.Not(), [value])


def compare(operator: str, left, right):
    """Compare two values."""
    return evaluate_operator(getattr(doc, operator)(), [left, right])


def choose(test, body: Callable, otherwise: Callable):
    """``body if test else otherwise``; of a Python bool only what is chosen is evaluated."""
    if isinstance(test, bool):
        return body() if test else otherwise()
    return tirx.op.if_then_else(test, body(), otherwise())
