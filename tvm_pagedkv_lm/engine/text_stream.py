# SPDX-License-Identifier: Apache-2.0
"""`TextStream`: the text of tokens as they come, whole characters at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = 16  # tokens of a text that is continued: more than a character has


class TextStream:
    """The text of tokens, without special ones.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    before : sequence of int
        The text that the tokens continue. Some tokenizers leave out the space before the first
        word of a text, but not before the words behind it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        context = [int(token) for token in before[-_CONTEXT:]]
        self._stream = DecodeStream(context, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Take a token; return the text that it completes."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the library raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
        # Of a run of bytes that are no text, all are shown as such, also those that were text.
        self._stream = DecodeStream([], skip_special_tokens=True)
        return self._stream.step(self._tokenizer, token) or ""
