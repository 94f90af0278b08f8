# SPDX-License-Identifier: Apache-2.0
"""Functions of kernels with a mistake in their source."""

from __future__ import annotations

import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable

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
    exec(compile(source, name, "exec"), names)
    return names[function.__name__]
