# SPDX-License-Identifier: Apache-2.0
"""Former names of keyword arguments, accepted with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**former: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose keyword arguments had other names.

    Parameters
    ----------
    **former : str
        Former name -> name of the argument.

    Returns
    -------
    callable
        A decorator. The function that it returns warns about former names, and raises a TypeError
        when an argument is given under both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in former:
                if old in kwargs:
                    _rename(function.__name__, old, former[old], kwargs)
            return function(*args, **kwargs)

        return call

    return decorate


def _rename(function: str, old: str, new: str, kwargs: dict[str, Any]) -> None:
    if new in kwargs:
        raise TypeError(f"{function}() got {new} twice: {old} is its former name")
    warnings.warn(
        f"the argument {old} of {function} is now called {new}", DeprecationWarning, stacklevel=3
    )
    kwargs[new] = kwargs.pop(old)
