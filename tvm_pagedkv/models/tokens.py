# SPDX-License-Identifier: Apache-2.0
"""Token ids that callers give: checked, for the embedding reads the rows that they name."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Token ids as an array.

    Parameters
    ----------
    name : str
        What they are, for messages.
    tokens : sequence of int, or array of integers [n]
    vocab_size : int

    Returns
    -------
    int32 [n]

    Raises
    ------
    TypeError
        For what are no integers.
    ValueError
        For an id that the vocabulary does not have, and for arrays of other shapes.
    """
    if hasattr(tokens, "__array__"):
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise ValueError(f"{name} must have shape [n], got {list(ids.shape)}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {ids.dtype}")
        tokens = ids.tolist()
    # Python's own integers: NumPy's array functions take longer for the tokens of a decode step.
    tokens = list(tokens)
    for token in tokens:
        if type(token) is not int and not _is_integer(token):
            raise TypeError(f"{name} must be integers, got {token!r}")
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise ValueError(
            f"token id {tokens[index]} at index {index} of {name} is not in [0, {vocab_size}), "
            "the model's vocabulary"
        )
    return np.array(tokens, "int32")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_batch(tokens: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """The token ids of all sequences of a step, one after the other: int32 [number of tokens].

    Raises
    ------
    TypeError, ValueError
        As `check_tokens`; ValueError where there are none.
    """
    parts = [check_tokens(f"tokens[{i}]", part, vocab_size) for i, part in enumerate(tokens)]
    if not parts:
        raise ValueError("a step needs the tokens of at least one sequence, got none")
    return np.concatenate(parts)
