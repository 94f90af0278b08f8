# SPDX-License-Identifier: Apache-2.0
"""`StopStrings`: finds strings that end a text, across the boundaries of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The end of a text, as long as it may be the beginning of a stop string.

    Parameters
    ----------
    strings : sequence of str

    Attributes
    ----------
    held : str
        Text that is not decided yet.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings, self.held = strings, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Append text to what is held.

        Returns
        -------
        text : str
            Text that is no part of a stop string.
        is_stop : bool
            Whether the text ends there, before the stop string that is complete first.
        """
        text = self.held + text
        found = [(text.find(each) + len(each), text.find(each)) for each in self.strings]
        complete = [(end, begin) for end, begin in found if begin >= 0]
        if complete:
            self.held = ""
            return text[: min(complete)[1]], True
        num_held = max(
            (n for each in self.strings for n in range(1, len(each)) if text.endswith(each[:n])),
            default=0,
        )
        cut = len(text) - num_held
        self.held = text[cut:]
        return text[:cut], False

    def rest(self) -> str:
        """Return what is held, at the end of the text."""
        text, self.held = self.held, ""
        return text
