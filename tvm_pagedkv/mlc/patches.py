# SPDX-License-Identifier: Apache-2.0
"""Replaced attributes of other packages, and how they were before."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes that were set on modules and classes, for `undo` to put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute and remember what it was, or that there was none."""
        # A class attribute is read from the class itself: a classmethod must stay one, and an
        # inherited attribute must not be copied down.
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_missing(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute only where there is none."""
        if not hasattr(owner, name):
            self.set(owner, name, value)

    def undo(self) -> None:
        """Put every attribute back, the last one first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class Overlay:
    """A module as one importer sees it: some attributes replaced, all others as they are.

    It stands in for a module in the namespace of the one file that is to see the change, so that
    nobody else's view of the module changes.
    """

    def __init__(self, module: Any, **replaced: Any):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
