# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters that a model's makers recommend."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..config.fields import is_number

# Fields that transformers applies and this package does not, with a value that changes nothing;
# those that are null, false or empty change nothing either.
_OF_SAMPLING = {
    "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None,
}  # fmt: skip
_OF_ALL_TEXTS = {
    "no_repeat_ngram_size": 0, "presence_penalty": 0, "frequency_penalty": 0, "num_beams": 1,
    "penalty_alpha": 0, "guidance_scale": 1, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "stop_strings": None, "dola_layers": None,
    "watermarking_config": None,
}  # fmt: skip


def sampling_defaults(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what the fields of a ``generation_config.json`` say about sampling.

    A warning names the fields that are not applied.

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
    is_greedy = fields.get("do_sample") is False
    found: dict[str, Any] = {}
    for name, is_valid, expected in (
        ("temperature", lambda x: x >= 0, "0 or more"),
        ("top_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
        ("top_k", lambda x: x >= -1 and x == int(x), "an integer, or -1 for all tokens"),
        ("repetition_penalty", lambda x: x > 0, "positive"),
    ):
        value = fields.get(name)
        if value is None:
            continue
        if not (is_number(value) and is_valid(value)):
            raise ValueError(f"{where}: {name} must be {expected}, got {value!r}")
        found[name] = max(0, int(value)) if name == "top_k" else float(value)
    ignored = _OF_ALL_TEXTS if is_greedy else _OF_SAMPLING | _OF_ALL_TEXTS
    names = [
        name
        for name, neutral in ignored.items()
        if fields.get(name) and fields[name] != neutral  # null, false, 0 and empty ones are not
    ]
    if names:
        warnings.warn(f"{where}: {', '.join(names)} not applied", UserWarning, stacklevel=2)
    return found | ({"temperature": 0.0} if is_greedy else {})
