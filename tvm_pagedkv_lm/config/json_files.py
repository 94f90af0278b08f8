# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON files of a model's directory, and says what is wrong with those that are none."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32 begins with the former, too


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which may begin with a byte order mark.

    ``NaN`` and ``Infinity`` are numbers, as in the files that Python and PyTorch write.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not UTF-8 or no JSON object, or if an object has a key twice with different values;
        the message names the file.
    """
    check_content(file)
    data = file.read_bytes()
    if data.startswith(_UTF_16) or b"\0" in data[:4]:
        raise ValueError(f"{file} is in UTF-16 or UTF-32; JSON files must be UTF-8")
    try:
        fields = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    except _RepeatedKey as error:
        raise ValueError(f"{file} {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds a {type(fields).__name__}; expected a JSON object")
    return fields


def check_content(file: Path) -> None:
    """Raise a ValueError for the pointer that a clone without Git LFS has in place of a file."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{file} is a pointer to a file in Git LFS, not the file itself; run: git lfs pull"
            )


class _RepeatedKey(ValueError):
    """An object has a key twice, with different values."""


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; readers differ about which of two values of a key counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if repr(value) != repr(found[name]):  # NaN differs from itself
                raise _RepeatedKey(f"has {name} twice: {value!r:.80} and {found[name]!r:.80}")
    return found
