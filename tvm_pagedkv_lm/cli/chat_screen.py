# SPDX-License-Identifier: Apache-2.0
"""What a conversation looks like: styled on a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

PROMPT = "> "


class PlainScreen:
    """Answers on stdout and notes on stderr, without styles."""

    def read(self) -> str | None:
        """Return the next line of the input; None at its end."""
        try:
            return input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return None

    def write(self, piece: str) -> None:
        """Show a piece of an answer."""
        print(piece, end="", flush=True)

    def end(self) -> None:
        """End an answer."""
        print(flush=True)

    def note(self, text: str) -> None:
        """Show what is no answer."""
        print(text, file=sys.stderr, flush=True)


class RichScreen(PlainScreen):
    """The same on a terminal, with colours."""

    def __init__(self) -> None:
        from rich.console import Console

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lets the user edit lines, and find earlier ones
        self._console: Any = Console(highlight=False, soft_wrap=True)

    def write(self, piece: str) -> None:
        self._console.print(piece, end="", style="cyan", markup=False, emoji=False)

    def end(self) -> None:
        self._console.print()

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, emoji=False)


def screen_of() -> PlainScreen:
    """Return the screen for this process's input and output."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            return RichScreen()
    return PlainScreen()
