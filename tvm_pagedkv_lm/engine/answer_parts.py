# SPDX-License-Identifier: Apache-2.0
"""What a model thinks, and what it says, where special tokens part the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .events import FinishedEvent, Statistics, TextEvent

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_SAID = "final"
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<|channel>", "<channel|>"


class AnswerParts:
    """Divides an answer by the special tokens of its model's tokenizer.

    In OpenAI's harmony format, in which GPT-OSS writes, messages are in channels, ``final`` or
    another one. Gemma 4 writes what it thinks in blocks, whose first line is a name::

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
        <|channel>thought
        ...<channel|>...

    An answer without these tokens is said. So is all of a model whose tokenizer lacks them.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer

    Attributes
    ----------
    said, thought : str
        The text so far in the channel ``final`` or outside of blocks, and the rest.
    """

    def __init__(self, tokenizer: Any):
        blocks = _marks(tokenizer, _THOUGHT_BEGINS, _THOUGHT_ENDS)
        channels = _marks(tokenizer, _START, _CHANNEL, _MESSAGE, _END)
        self._format = _Blocks(blocks) if blocks else _Channels(channels)
        self.said = self.thought = ""

    def take(self, token: int, text: str) -> str:
        """Take a token, and the text that it adds; return what of this is said."""
        said, thought = self._format.take(token, text)
        self.said += said
        self.thought += thought
        return said


def _marks(tokenizer: Any, *marks: str) -> dict[int, str]:
    """Return tokens by their ids, if the tokenizer has all of them."""
    ids = [tokenizer.token_to_id(mark) for mark in marks]
    return {} if None in ids else dict(zip(ids, marks, strict=True))


class _Channels:
    """The harmony format; without marks, all is said."""

    def __init__(self, marks: dict[int, str]):
        self.marks, self.last_mark, self.channel = marks, _MESSAGE, _SAID

    def take(self, token: int, text: str) -> tuple[str, str]:
        """Return what is said of the text, and what is thought."""
        parts = "", ""
        if self.last_mark == _CHANNEL:
            self.channel += text
        elif self.last_mark == _MESSAGE:  # more than its name may stand behind a channel
            is_said = self.channel.split()[:1] == [_SAID]
            parts = (text, "") if is_said else ("", text)
        mark = self.marks.get(token)
        if mark is not None:
            self.last_mark = mark
            if mark != _MESSAGE:
                self.channel = "" if mark == _CHANNEL else _SAID
        return parts


class _Blocks:
    """The format of Gemma 4."""

    def __init__(self, marks: dict[int, str]):
        self.marks, self.is_thought, self.is_name = marks, False, False

    def take(self, token: int, text: str) -> tuple[str, str]:
        """Return what is said of the text, and what is thought."""
        mark = self.marks.get(token)
        if mark is not None:  # in the text, where the tokenizer does not call it special
            text = text.removesuffix(mark)
        is_thought, is_name = self.is_thought, self.is_name
        if is_name:
            _, newline, text = text.partition("\n")
            self.is_name = not newline
        if mark is not None:
            self.is_thought = self.is_name = mark == _THOUGHT_BEGINS
        return ("", text) if is_thought else (text, "")


def said(
    events: Iterable[TextEvent | FinishedEvent | Statistics], tokenizer: Any
) -> Iterator[TextEvent | FinishedEvent | Statistics]:
    """Yield the events of answers with the text that is said."""
    parts: defaultdict[tuple[int, int], AnswerParts] = defaultdict(lambda: AnswerParts(tokenizer))
    for event in events:
        if isinstance(event, Statistics):
            yield event
            continue
        part = parts[event.prompt, event.continuation]
        if isinstance(event, TextEvent):
            yield replace(event, text=part.take(event.token, event.text))
        else:
            yield replace(event, text=part.said)
