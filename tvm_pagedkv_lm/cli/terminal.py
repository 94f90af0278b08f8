# SPDX-License-Identifier: Apache-2.0
"""Display of texts and progress: streamed, in blocks, or live on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from ..model.progress import PROGRESS

_log = logging.getLogger("tvm_pagedkv")


def missing(error: ModuleNotFoundError, extra: str) -> RuntimeError:
    """Return the error for a package that is not installed, which names the extra that has it."""
    return RuntimeError(
        f"{error.name} is not installed; install what this command needs with: "
        f"pip install 'tvm-pagedkv[{extra}]'"
    )


class Progress(logging.Handler):
    """Shows what the package logs: as a spinner on a terminal, as lines on stderr elsewhere.

    A context manager: it listens to the logger ``tvm_pagedkv`` while it is entered.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._status: Any = None
        self._level = logging.NOTSET

    def __enter__(self) -> Progress:
        self._level = _log.level
        _log.setLevel(logging.INFO)
        _log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _log.removeHandler(self)
        _log.setLevel(self._level)
        self.stop()

    def stop(self) -> None:
        """Remove the spinner; the next record shows it again."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record; steps of longer work only on a terminal."""
        line, console = record.getMessage(), _console()
        if console is None:
            if record.name != PROGRESS:
                print(line, file=sys.stderr, flush=True)
            return
        if self._status is None:
            is_utf8 = console.encoding.startswith("utf")
            self._status = console.status(line, spinner="dots" if is_utf8 else "line")
            self._status.start()
        self._status.update(line)


def _console() -> Any:
    """Return the terminal of stderr; None if it is none, or rich is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(stderr=True)


def display_of(prompts: list[str], n: int):
    """Return the display for `n` continuations per prompt: a context manager for events."""
    if len(prompts) * n == 1:
        return _Stream(prompts[0])
    if sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            return _Live(prompts, n)
    return _Blocks(prompts, n)


class _Stream(contextlib.AbstractContextManager):
    """Shows one continuation: the prompt, then the text as it is generated.

    The prompt waits for the first token, because the spinner of its computation is on this line.
    """

    def __init__(self, prompt: str):
        self._prompt = prompt

    def __exit__(self, *_) -> None:
        print(self._take_prompt(), flush=True)

    def text(self, event) -> None:
        print(self._take_prompt() + event.text, end="", flush=True)

    def _take_prompt(self) -> str:
        prompt, self._prompt = self._prompt, ""
        return prompt

    def finished(self, event) -> None:
        """Nothing is left to print."""


class _Blocks(contextlib.AbstractContextManager):
    """Shows several continuations: each under a header when it is finished."""

    def __init__(self, prompts: list[str], n: int):
        self.prompts, self.n = prompts, n

    def __exit__(self, *_) -> None:
        """Nothing to clean up."""

    def text(self, event) -> None:
        """Show nothing until the continuation is finished."""

    def finished(self, event) -> None:
        header = f"prompt {event.prompt + 1}" if len(self.prompts) > 1 else ""
        if self.n > 1:
            separator = ", " if header else ""
            header += f"{separator}continuation {event.continuation + 1} of {self.n}"
        print(f"--- {header} ---\n{self.prompts[event.prompt]}{event.text}\n", flush=True)


class _Live(_Blocks):
    """Shows several continuations live on a terminal; finished ones stay."""

    def __init__(self, prompts: list[str], n: int):
        super().__init__(prompts, n)
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._texts = {(p, i): "" for p in range(len(prompts)) for i in range(n)}
        self._live = Live(console=self._console, transient=True, get_renderable=self._render)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self._live.stop()

    def text(self, event) -> None:
        self._texts[event.prompt, event.continuation] += event.text

    def finished(self, event) -> None:
        del self._texts[event.prompt, event.continuation]
        super().finished(event)

    def _render(self):
        from rich.text import Text

        texts = list(self._texts.items())  # Live renders in a thread of its own
        room = max(2, self._console.height // max(1, len(texts)) - 1)
        out = Text()
        for (prompt, index), text in texts:
            lines = f"{self.prompts[prompt]}{text}".splitlines()[-room:]
            out.append(f"prompt {prompt + 1}, continuation {index + 1}\n", style="bold")
            out.append("\n".join(lines) + "\n")
        return out
