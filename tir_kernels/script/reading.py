# SPDX-License-Identifier: Apache-2.0
"""The kernels that are being read: names of their variables, and numbers of open blocks."""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm.ir import Var
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder


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
