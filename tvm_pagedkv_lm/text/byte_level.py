# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE, as GPT-2 began it: a character stands for each byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .splitters import DIGITS, Splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def byte_characters() -> list[str]:
    """Return the character that stands for each byte.

    Bytes that print as Latin-1 stand for themselves; the others count up from 256.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def byte_level_bpe(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], splitter: Splitter
) -> Tokenizer:
    """Return a tokenizer without special tokens.

    Parameters
    ----------
    vocabulary : dict
        Token, with a character for each byte, to id.
    merges : sequence of (str, str)
        Pairs that are merged, the first ones first.
    splitter : Splitter
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    bpe = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=splitter.ignores_merges)
    tokenizer = Tokenizer(bpe)
    steps: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if expression == DIGITS
        else pre_tokenizers.Split(Regex(expression), "isolated")
        for expression in splitter.expressions
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitter.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def merges_of(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those with the highest score first."""
    found = []
    for token, index in vocabulary.items():
        for end in range(1, len(token)):
            left, right = vocabulary.get(token[:end]), vocabulary.get(token[end:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:end], token[end:])))
    return [pair for *_, pair in sorted(found)]
