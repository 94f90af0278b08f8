# SPDX-License-Identifier: Apache-2.0
"""`Metadata`: checked access to the keys of a GGUF file, which knows the keys that nobody read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REQUIRED: Any = object()
_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    object: "a number or a list",
}


class Metadata:
    """The keys of a GGUF file.

    Parameters
    ----------
    values : mapping
    where : str
        Name of the file in errors.

    Attributes
    ----------
    architecture : str
        ``general.architecture``: the first part of the keys that describe the model.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where
        self._read: set[str] = set()
        self.architecture = self.get("general.architecture", str)

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return the value of a key.

        Parameters
        ----------
        key : str
        kind : {int, float, str, bool, list, object}
            Its type; an integer is a number as well. object: a number or a list.
        default : optional
            The value if the key is absent.

        Raises
        ------
        ValueError
            If the key is absent and has no default, or is of another type.
        """
        self._read.add(key)
        if key not in self._values:
            if default is _REQUIRED:
                raise ValueError(f"{self._where} lacks the key {key}")
            return default
        value = self._values[key]
        is_number = kind is float and isinstance(value, int | float)
        if isinstance(value, bool) is not (kind is bool) or not (
            isinstance(value, kind) or is_number
        ):
            raise ValueError(f"{self._where}: {key} must be {_WORDS[kind]}, got {value!r:.80}")
        return value

    def __contains__(self, name: str) -> bool:
        """Whether there is a key below the architecture."""
        return f"{self.architecture}.{name}" in self._values

    def of_model(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return the value of a key below the architecture, such as "block_count"."""
        return self.get(f"{self.architecture}.{name}", kind, default)

    def refuse_unread(self) -> None:
        """Raise a ValueError for a key of the architecture that nobody has read.

        It may change what the model computes.
        """
        for key in self._values:
            if key.startswith(f"{self.architecture}.") and key not in self._read:
                raise ValueError(
                    f"{self._where} has the key {key} ({self._values[key]!r:.60}), which is not "
                    "supported"
                )
