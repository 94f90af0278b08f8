# SPDX-License-Identifier: Apache-2.0
"""What rewritten source calls: loops, branches, assignments, expressions and operators.

`reading` keeps the names of the variables of the kernel that is read, and its open blocks.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Var
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.script.ir_builder.base import IRBuilderFrame
from tvm.script.parser._core import doc
from tvm.script.parser.core.evaluator import _eval_op as evaluate_operator
from tvm.tirx.buffer import is_buffer_var
from tvm.tirx.script import builder
from tvm.tirx.script.builder.ir import name_meta_class_value, scalar_wrapper

from ..releases import StringImm, TensorLoad, TensorRegion, buffer_of


@dataclass
class Reading:
    """A kernel that is being read.

    Attributes
    ----------
    named : set of Var
        Variables that have a name.
    scope : list of Var
        Numbers declared in the open block.
    ended : set of Var
        Numbers of closed blocks. Python keeps their names, TVMScript does not.
    """

    named: set[Var] = field(default_factory=set)
    scope: list[Var] = field(default_factory=list)
    ended: set[Var] = field(default_factory=set)

    def name(self, name: str, variable: Var) -> Var:
        """Name a variable."""
        IRBuilder.name(name, variable)
        self.named.add(variable)
        return variable

    @contextmanager
    def block(self) -> Iterator[None]:
        """Open a block, at whose end the numbers declared in it end."""
        outer, self.scope = self.scope, []
        try:
            yield
        finally:
            self.ended.update(self.scope)
            self.scope = outer


class _Open(threading.local):
    def __init__(self):
        self.readings: list[Reading] = []  # a kernel may be read within another one


_open = _Open()


def is_reading() -> bool:
    """Return whether a kernel is being read by this thread."""
    return bool(_open.readings)


def current() -> Reading:
    """Return the kernel that is being read."""
    return _open.readings[-1]


@contextmanager
def reading() -> Iterator[Reading]:
    """Read a kernel meanwhile."""
    record = builder.ir._record_meta_resource
    builder.ir._record_meta_resource = _record_resource
    _open.readings.append(Reading())
    try:
        yield current()
    finally:
        _open.readings.pop()
        builder.ir._record_meta_resource = record


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


def name_variable(name: str, value) -> None:
    """Name what a frame has made."""
    if isinstance(value, Var):
        current().name(name, value)


def block() -> AbstractContextManager:
    """Open a block, at whose end the numbers declared in it end."""
    return current().block()


def loop(frame, names: tuple[str, ...]) -> Iterator:
    """Yield the variables of a loop, once, within it."""
    if not isinstance(frame, builder.frame.ForFrame):
        raise TypeError(f"a loop goes over range, T.serial, T.unroll and the like; got {frame!r}")
    with frame as variables:
        many = isinstance(variables, (list, tuple, tvm.ir.Array))
        for name, variable in zip(names, variables if many else [variables], strict=True):
            name_variable(name, variable)
        with block():
            yield variables


def repeat(condition) -> Iterator[None]:
    """Open a while loop."""
    with builder.While(condition), block():
        yield


def branches(condition, has_else: bool) -> Iterator[bool]:
    """Open the branches of an if, one after the other; of a Python bool only the one taken."""
    if isinstance(condition, bool):
        if condition or has_else:
            yield condition
        return
    with builder.If(condition):
        with builder.Then(), block():
            yield True
        if has_else:
            with builder.Else(), block():
                yield False


def _scalar_buffer(value):
    """Return the buffer of one number that a name stands for, or None."""
    if isinstance(value, scalar_wrapper):
        value = value.scalar
    found = buffer_of(value) if isinstance(value, TensorLoad) else value
    if is_buffer_var(found) and len(found.ty.shape) == 1 and bool(found.ty.shape[0] == 1):
        return found
    return None


def _variable(before: Callable):
    """Return what a name stood for and, if that is a variable, the buffer of its number."""
    try:
        old = before()
    except NameError:
        return None, None
    target = None if old is None else _scalar_buffer(old)
    return old, None if target in current().ended else target


def unpack(name: str, value, before: Callable):
    """Bind a name of a tuple. TVM's parser would make a second variable of the name."""
    if _variable(before)[1] is not None:
        raise TypeError(f"{name} is a variable already; assign it alone, not in a tuple")
    return _bind(name, value)


def assign(name: str, value, before: Callable):
    """Bind a name, or store to the number that it stands for."""
    old, target = _variable(before)
    if target is not None:
        try:
            builder.buffer_store(target, value, [0])
            return old
        except TypeError:
            pass
    return _bind(name, value)


def _declare_scalar(name: str, scalar):
    """Name a number of the block that is read."""
    IRBuilder.name(name, buffer_of(scalar))
    current().scope.append(buffer_of(scalar))
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
    if isinstance(value, TensorRegion):
        return value
    if isinstance(value, IRBuilderFrame):
        value.add_callback(functools.partial(value.__exit__, None, None, None))
        entered = value.__enter__()
        IRBuilder.name(name, entered)
        return entered
    if is_buffer_var(value) or isinstance(value, (tirx.IterVar, tirx.Layout)):
        IRBuilder.name(name, value)
        return value
    if isinstance(value, Var) and value not in current().named:
        name_variable(name, value)
        return value
    if not isinstance(value, tvm.ir.Expr):
        value = tirx.const(value)
    if isinstance(value, StringImm) or not tvm.ir.is_prim_expr(value):
        variable = tirx.Var(name, value.ty)
        builder.Bind(value, var=variable)
        current().named.add(variable)
        return variable
    scalar = _declare_scalar(name, builder.local_scalar(dtype=str(value.ty.dtype)).scalar)
    builder.buffer_store(buffer_of(scalar), value, [0])
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
        builder.buffer_store(buffer_of(scalar), value, [0])
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
