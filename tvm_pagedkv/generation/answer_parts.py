# SPDX-License-Identifier: Apache-2.0
"""What a model thinks, and what it says, where special tokens part the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .events import FinishedEvent, Statistics, TextEvent

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_MARKS = (_START, _CHANNEL, _MESSAGE, _END)
_SAID = "final"


class AnswerParts:
    """Divides an answer by OpenAI's harmony format, in which GPT-OSS writes.

    Special tokens part its messages, each of which is in a channel, ``final`` or another one::

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

    An answer without these tokens is said. So is all of a model whose tokenizer lacks them.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer

    Attributes
    ----------
    said, thought : str
        The text so far in the channel ``final``, and that in all others.
    """

    def __init__(self, tokenizer: Any):
        ids = [tokenizer.token_to_id(mark) for mark in _MARKS]
        self._marks = {} if None in ids else dict(zip(ids, _MARKS, strict=True))
        self._last_mark = _MESSAGE
        self._channel = _SAID
        self.said = self.thought = ""

    def take(self, token: int, text: str) -> str:
        """Take a token, and the text that it adds; return what of this is said."""
        said = ""
        if self._last_mark == _CHANNEL:
            self._channel += text
        elif self._last_mark == _MESSAGE and self._channel.split()[:1] == [_SAID]:
            said = text  # more than its name may stand behind a channel
            self.said += text
        elif self._last_mark == _MESSAGE:
            self.thought += text
        mark = self._marks.get(token)
        if mark is not None:
            self._last_mark = mark
            if mark != _MESSAGE:
                self._channel = "" if mark == _CHANNEL else _SAID
        return said


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
