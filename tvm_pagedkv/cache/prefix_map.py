# SPDX-License-Identifier: Apache-2.0
"""The part of a page map about prefixes: in which tier each of their pages of text lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from .inspection import CacheInspection
from .prefix_lookup import locate_prefix
from .svg import MARGIN, WIDTH, count_of, ranges_of, square, text_of

# What tiers are called, and their colours: the nearer, the darker.
PAINTS = {"pool": "#1d5c45", "host": "#58a784", "store": "#b7dccb", "": "#ffffff"}
NAMES = {"pool": "in the pool", "host": "in host memory", "store": "in the store", "": "nowhere"}
MAX_PREFIXES_DRAWN, MAX_BLOCKS_DRAWN = 32, 1 << 12
PITCH, LINE = 14, 20


@dataclass(frozen=True)
class CachedPrefix:
    """The tiers of the full pages of a text when it was looked up."""

    name: str
    num_tokens: int
    tiers: tuple[tuple[str, ...], ...]  # [page][group] as `KVCache.locate_prefix` returns them

    @classmethod
    def of(
        cls, cache: CacheInspection, name: str, tokens: Sequence[int], salt: bytes
    ) -> CachedPrefix:
        """Look up a text."""
        return cls(name, len(tokens), tuple(locate_prefix(cache, tokens, salt)))

    def of_group(self, group: int) -> list[str]:
        """Return the tier of each page in a layer group."""
        return [tiers[group] for tiers in self.tiers]

    def to_text(self, num_groups: int) -> Iterator[str]:
        """Yield a line for each layer group: tiers, and the indices of the pages that they have."""
        for group in range(num_groups):
            tiers = self.of_group(group)
            parts = []
            for tier in PAINTS:
                indices = tuple(i for i, each in enumerate(tiers) if each == tier)
                if indices:
                    parts.append(f"{tier or 'nowhere'} {ranges_of(indices)}")
            where = ", ".join(parts) or "no full page"
            yield f"prefix {self.name} ({self.num_tokens}), group {group}: {where}"


def panel_of(prefixes: tuple[CachedPrefix, ...], num_groups: int, y: int) -> tuple[list[str], int]:
    """Draw a row for each prefix and layer group, and what the colours mean.

    Parameters
    ----------
    prefixes : tuple of CachedPrefix
    num_groups : int
    y : int
        Where the panel begins.

    Returns
    -------
    list of str, int
        Lines of SVG, and where the panel ends. Each page of text is a ``use`` with ``data-block``,
        its index, in a group with ``data-prefix`` and ``data-group``; it refers to a symbol with
        ``data-tier``.
    """
    size = PITCH - 2
    lines = ['<g class="prefixes">', "<defs>"]
    for tier, paint in PAINTS.items():
        body = square(size, size / 8, paint) if tier else _nowhere(size)
        lines.append(f'<g id="tier{tier}" data-tier="{tier}">{body}</g>')
    y += 24
    lines += ["</defs>", text_of(MARGIN, y, "heading", "Prefixes")]
    for prefix in prefixes[:MAX_PREFIXES_DRAWN]:
        for group in range(num_groups):
            more, y = _row(prefix, group, num_groups, y)
            lines += more
    num_more = len(prefixes) - MAX_PREFIXES_DRAWN
    if num_more > 0:
        y += LINE
        lines.append(text_of(MARGIN, y, "small", f"and {num_more} more"))
    y += 28
    for i, (tier, name) in enumerate(NAMES.items()):
        x = MARGIN + i * ((WIDTH - 2 * MARGIN) // len(NAMES))
        lines.append(f'<use href="#tier{tier}" x="{x}" y="{y - 11}"/>')
        lines.append(text_of(x + 20, y, "small", name))
    return [*lines, "</g>"], y + 8


def _row(prefix: CachedPrefix, group: int, num_groups: int, y: int) -> tuple[list[str], int]:
    """Draw the pages of a prefix in a layer group below a line that counts them."""
    tiers = prefix.of_group(group)
    y += LINE
    title = f"{prefix.name}: {count_of(prefix.num_tokens, 'token')}"
    title += f", group {group}" if num_groups > 1 else ""
    counts = Counter(tiers)
    for tier, name in NAMES.items():
        title += f"; {count_of(counts[tier], 'page')} {name}" if counts[tier] else ""
    if len(tiers) > MAX_BLOCKS_DRAWN:
        title += f"; those from {MAX_BLOCKS_DRAWN} on are not drawn"
    lines = [
        text_of(MARGIN, y, "small", title),
        f'<g data-prefix={quoteattr(prefix.name)} data-group="{group}">',
    ]
    columns = (WIDTH - 2 * MARGIN) // PITCH
    for i, tier in enumerate(tiers[:MAX_BLOCKS_DRAWN]):
        at = f'x="{MARGIN + i % columns * PITCH}" y="{y + 7 + i // columns * PITCH}"'
        about = escape(f"page {i} of {prefix.name}: {NAMES[tier]}")
        lines.append(f'<use href="#tier{tier}" {at} data-block="{i}"><title>{about}</title></use>')
    num_rows = -(-min(len(tiers), MAX_BLOCKS_DRAWN) // columns)
    return [*lines, "</g>"], y + 7 + num_rows * PITCH


def _nowhere(size: int) -> str:
    """The frame of a page that no tier has."""
    return (
        f'<rect x="0.5" y="0.5" width="{size - 1}" height="{size - 1}" rx="{size / 8:g}" '
        f'fill="{PAINTS[""]}" stroke="#b9c2cc"/>'
    )
