# SPDX-License-Identifier: Apache-2.0
"""Replacement of attributes of other packages, with undo."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Sets attributes of modules and classes, and restores them with `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, and remember its former value or absence."""
        # A class attribute is read from the class itself: a classmethod must stay one, and an
        # inherited attribute must not be copied down.
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_missing(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute if it does not exist."""
        if not hasattr(owner, name):
            self.set(owner, name, value)

    def undo(self) -> None:
        """Restore all attributes in reverse order."""
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
