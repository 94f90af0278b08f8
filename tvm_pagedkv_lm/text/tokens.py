# SPDX-License-Identifier: Apache-2.0
"""Checks of token ids, which index the rows of the embedding."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that begins a sequence, with what its tokenizer adds.

    A text that has BOS itself gets no second one.
    """
    encoding = tokenizer.encode(text)
    ids = encoding.ids
    if ids[:1] == ids[1:2] and ids:
        is_added, is_own = encoding.special_tokens_mask[:2]
        if is_added and not is_own:
            return ids[1:]
    return ids


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Check token ids and return them as an array.

    Parameters
    ----------
    name : str
        Name of the argument in errors.
    tokens : sequence of int, or integer array ``[n]``
    vocab_size : int

    Returns
    -------
    int32 ``[n]``

    Raises
    ------
    TypeError
        If an id is not an integer.
    ValueError
        If an id is not in the vocabulary, or an array has another shape.
    """
    if hasattr(tokens, "__array__"):
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise ValueError(f"{name} must have shape [n], got {list(ids.shape)}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {ids.dtype}")
        tokens = ids.tolist()
    # Python integers are faster than NumPy functions for the few tokens of a decode step.
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
    """Check the token ids of all sequences of a step and concatenate them.

    Returns
    -------
    int32 ``[T]``

    Raises
    ------
    TypeError, ValueError
        As `check_tokens`; ValueError also if there are no sequences.
    """
    parts = [check_tokens(f"tokens[{i}]", part, vocab_size) for i, part in enumerate(tokens)]
    if not parts:
        raise ValueError("a step needs the tokens of at least one sequence, got none")
    return np.concatenate(parts)
