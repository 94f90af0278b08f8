# SPDX-License-Identifier: Apache-2.0
"""`Metadata`: checked access to the keys of a GGUF file, which knows the keys that nobody read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .neutral_keys import is_neutral

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

    Raises
    ------
    ValueError
        If there is no architecture, or this is one of several files.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where
        self._read: set[str] = set()
        if self.get("split.count", int, 0) > 1:  # only the first part has the other keys
            raise ValueError(
                f"{where}: split.count: this is one of several files; join them with "
                "llama-gguf-split --merge"
            )
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
        return self._checked(key, kind, self._values[key])

    def _checked(self, key: str, kind: type, value: Any) -> Any:
        """Return a value after a check of its type."""
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
        """Return the value of a key below the architecture, such as "block_count".

        Files may have a number for each layer where one is asked for; they must be equal then.
        """
        key = f"{self.architecture}.{name}"
        if kind not in (int, float, bool) or not isinstance(self._values.get(key), list):
            return self.get(key, kind, default)
        value = _of_all_layers(self.get(key, list))
        if isinstance(value, list):
            raise ValueError(
                f"{self._where}: {key} must be the same for all layers, got {value!r:.80}"
            )
        return self._checked(key, kind, value)

    def refuse_unread(self) -> None:
        """Raise a ValueError for a key of the architecture that may change what it computes.

        Keys that have been read do not, nor do those that `is_neutral` knows.
        """
        prefix = f"{self.architecture}."
        keys = {
            key.removeprefix(prefix): _of_all_layers(value)
            for key, value in self._values.items()
            if key.startswith(prefix)
        }
        for name, value in keys.items():
            if f"{prefix}{name}" not in self._read and not is_neutral(name, value, keys):
                raise ValueError(
                    f"{self._where} has the key {prefix}{name} ({value!r:.60}), which is not "
                    "supported"
                )


def _of_all_layers(value: Any) -> Any:
    """Return the value that a list has for every layer; what is no such list as it is."""
    if not isinstance(value, list) or not value or any(each != value[0] for each in value):
        return value
    return value[0]
