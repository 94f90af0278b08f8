# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters that a model's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import positive_number

_OFF = {"temperature": (0,), "top_k": (0, -1)}  # -1 as vLLM has it


def sampling_defaults(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what the fields of a ``generation_config.json`` say about sampling.

    Parameters
    ----------
    fields : mapping
    where : str
        Name of the file in errors.

    Returns
    -------
    dict
        Any of "temperature", "top_p", "top_k" (0: all tokens) and "repetition_penalty".
        ``do_sample: false`` is a temperature of 0.

    Raises
    ------
    ValueError
        If a value is invalid; the message names the field.
    """
    found: dict[str, Any] = {}
    try:
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            is_off = fields.get(name) in _OFF.get(name, ())
            value = 0 if is_off else positive_number(fields, name, None)
            if value is not None:
                found[name] = int(value) if name == "top_k" else float(value)
        if found.get("top_p", 1.0) > 1:
            raise ValueError(f"top_p must be at most 1, got {found['top_p']}")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return found | ({"temperature": 0.0} if fields.get("do_sample") is False else {})
