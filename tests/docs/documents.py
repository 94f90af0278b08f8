# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs/, cut into what the tests look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r'title="([^"]*)"')
_NOT_RUN = "not run: "
_PRINTS = "prints"


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Parameters
    ----------
    page : Path
    line : int
        The line of its first line of code, counted from 1.
    language : str
        The first word of the info string.
    title : str
        The ``title="..."`` of the info string, which readers see above the block.
    code : str
    """

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason_not_to_run(self) -> str:
        """Why the tests do not run it; empty where they do."""
        return self.title.removeprefix(_NOT_RUN) if self.title.startswith(_NOT_RUN) else ""

    @property
    def is_output(self) -> bool:
        """Whether it shows what the block before it prints."""
        return self.language == "text" and self.title == _PRINTS


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        title = _TITLE.search(info)
        line = text.count("\n", 0, match.start("code")) + 1
        language = info.split()[0] if info else ""
        blocks.append(Block(page, line, language, title[1] if title else "", match["code"]))
    return blocks


def prose_of(page: Path) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The names under which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.+?)\s*$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
