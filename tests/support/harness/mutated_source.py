# SPDX-License-Identifier: Apache-2.0
"""Functions of kernels with a mistake in their source."""

from __future__ import annotations
import __future__

import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

_numbers = itertools.count()


def with_mistake(function: Callable, old: str, new: str) -> Callable:
    """Return a function of a module or class with some of its source replaced.

    `old` has to occur once, decorators included. A function of TVMScript, which
    `tir_kernels.script.inline` marks, is read from its source again.
    """
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in\n{source}"
    source, name = source.replace(old, new), f"<mistake {next(_numbers)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names = dict(function.__globals__)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag  # of its module
    exec(compile(source, name, "exec", flags, dont_inherit=True), names)
    return names[function.__name__]


@dataclass(frozen=True)
class Mistake:
    """A mistake in the source of a function, and what finds it.

    Parameters
    ----------
    check : callable
        Raises AssertionError where it finds the mistake.
    owner : module or class
    name : str
        That of the function in `owner`.
    old, new : str
        As `with_mistake` takes them.
    """

    check: Callable
    owner: object
    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.check.__name__}-{self.name}-{self.new}"

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function by the one with the mistake."""
        function = with_mistake(getattr(self.owner, self.name), self.old, self.new)
        monkeypatch.setattr(self.owner, self.name, function)
