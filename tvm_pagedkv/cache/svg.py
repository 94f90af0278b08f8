# SPDX-License-Identifier: Apache-2.0
"""Drawing primitives of page maps."""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH, MARGIN = 960, 24


def text_of(x: float, y: float, css: str, text: str) -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(text)}</text>'


def square(size: int, corner: float, paint: str) -> str:
    """A filled square with rounded corners."""
    return f'<rect width="{size}" height="{size}" rx="{corner:g}" fill="{paint}"/>'


def count_of(number: int, noun: str) -> str:
    """``1 page``, ``1,234 pages``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges_of(numbers: tuple[int, ...]) -> str:
    """``0-3, 5`` for (0, 1, 2, 3, 5)."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
