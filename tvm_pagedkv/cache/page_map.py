# SPDX-License-Identifier: Apache-2.0
"""The owners of a cache's pages at one moment, as text or as an SVG picture."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .inspection import CacheInspection
from .prefix_map import CachedPrefix, panel_of
from .svg import MARGIN, WIDTH, count_of, ranges_of, square, text_of

LABEL_WIDTH = 52
# Distances of pages, of which the widest is taken that keeps a panel within MAX_PANEL_HEIGHT.
PITCHES = (36, 27, 22, 18, 13, 11, 9, 7, 5, 4)
MAX_PANEL_HEIGHT = 640
MAX_PAGES_DRAWN, MAX_SEQUENCES_NAMED = 1 << 16, 30
LEGEND_COLUMNS, LEGEND_LINE = 3, 20
# The first sequences have colours that are easy to tell apart; more walk around the wheel.
COLOURS = ("#4c78a8", "#f2a541", "#59a56b", "#d1605e", "#8f6fb5", "#3aa6a0", "#e387b4", "#9b7653")
FREE, CACHED = "#eef1f4", "#b9c2cc"
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#2b3440}"
    ".title{font-size:20px;font-weight:600}.heading{font-size:14px;font-weight:600}"
    ".small{font-size:12px;fill:#66707c}.label{font-size:9px;fill:#8a939e;text-anchor:end}"
    ".id{fill:#1b2530;fill-opacity:.85}.badge{fill:#1b2530;fill-opacity:.8}"
    ".count{font-weight:700;text-anchor:middle;fill:#fff}"
)


@dataclass(frozen=True)
class PageGroup:
    """The pages of the layers of one shape and window, or those of their states."""

    layers: tuple[int, ...]
    kind: str
    window: int
    num_pages: int
    tables: dict[int, list[int]]  # page ids by sequence
    first_positions: dict[int, int]  # of the first slot in the table, by sequence
    owners: dict[int, tuple[int, ...]]  # sequences by page, of the pages in use
    slots: dict[int, int]  # slots in use by page, of the pages in use
    cached: frozenset[int]  # pages without an owner whose content is known
    codec: str | None = None  # by which the pages are quantized
    interval: int = 0  # of pages that hold states: positions from one to the next

    @property
    def shape(self) -> str:
        """What the layers are, in words."""
        text = f"{self.kind}, window {self.window}" if self.window else self.kind
        if self.interval:
            text += f", a state every {count_of(self.interval, 'token')}"
        return f"{text}, {self.codec}" if self.codec else text

    @property
    def num_shared(self) -> int:
        """Pages with more than one owner."""
        return sum(len(owners) > 1 for owners in self.owners.values())


@dataclass(frozen=True)
class PageMap:
    """The pages that a cache held at one moment."""

    page_size: int
    lengths: dict[int, int]  # by sequence, in ascending order of ids
    groups: tuple[PageGroup, ...]
    prefixes: tuple[CachedPrefix, ...] = ()
    state_groups: tuple[PageGroup, ...] = ()

    @classmethod
    def of(
        cls,
        cache: CacheInspection,
        prefixes: Mapping[str, Sequence[int]] | None = None,
        salt: bytes = b"",
    ) -> PageMap:
        """Look at a cache, and at the tiers that have the pages of these texts.

        Parameters
        ----------
        cache : KVCache
        prefixes : name -> token ids, optional
        salt : bytes
            Of all prefixes.
        """
        page_size, layers = cache.description["page_size"], cache._kept_layers
        lengths = {seq_id: cache.sequence_length(seq_id) for seq_id in cache.sequence_ids()}
        groups = []
        for index, stats in enumerate(cache.stats()["groups"]):
            tables = {seq_id: cache.page_table(seq_id, index) for seq_id in lengths}
            first = {seq_id: cache.first_position(seq_id, index) for seq_id in lengths}
            owners, slots = _owners(tables, first, lengths, page_size)
            ours = [layer for layer in layers if layer["group"] == index]
            kind, num_pages = ours[0]["kind"], stats["num_pages"]
            ids = tuple(layer["id"] for layer in ours)
            cached = frozenset(cache.cached_pages(index))
            codec = ours[0]["kv_dtype"] if ours[0]["is_quantized"] else None
            pages = num_pages, tables, first, owners, slots, cached
            groups.append(PageGroup(ids, kind, stats["window"], *pages, codec))
        texts = (prefixes or {}).items()
        located = (CachedPrefix.of(cache, name, tokens, salt) for name, tokens in texts)
        states = tuple(
            _states(cache, index, stats, lengths, len(groups))
            for index, stats in enumerate(cache.stats()["state_groups"])
        )
        return cls(page_size, lengths, tuple(groups), tuple(located), states)

    def to_text(self) -> str:
        """The page table of every sequence, by group; ``*`` marks a shared page.

        Then the tiers of the prefixes, with the indices of the pages of text that they have.
        """
        lines = []
        for name, index, group in self.panels():
            used = f"{len(group.owners)} of {group.num_pages} pages in use"
            cached = f", {len(group.cached)} cached" if group.cached else ""
            codec = f", {group.codec}" if group.codec else ""
            lines.append(f"{name} {index}: {used}{cached}{codec}")
            for seq_id, table in group.tables.items():
                pages = [f"{page}{'*' if len(group.owners[page]) > 1 else ''}" for page in table]
                first = group.first_positions[seq_id]
                gone = f"from position {first}: " if first else ""
                about = "states" if group.interval else self.lengths[seq_id]
                lines.append(f"  sequence {seq_id} ({about}): {gone}{' '.join(pages)}")
        for prefix in self.prefixes:
            lines += prefix.to_text(len(self.groups))
        return "\n".join(lines)

    def panels(self) -> Iterator[tuple[str, int, PageGroup]]:
        """The groups, then those of states, each with its name and number."""
        yield from (("group", i, group) for i, group in enumerate(self.groups))
        yield from (("state group", i, group) for i, group in enumerate(self.state_groups))

    def to_svg(self) -> str:
        """A picture: a panel for each group with its pages in the order of their ids.

        A page has the colour of its sequence, or diagonal bands in the colours of all of them and
        their number; the pale part at its top is not filled. In the file, every page is a ``use``
        with ``data-page`` and ``data-slots`` (in use) that refers to a symbol with ``data-owners``;
        that of a cached page has ``data-cached``. Prefixes follow, see `prefix_map.panel_of`.
        """
        return "\n".join(_Picture(self).lines()) + "\n"


def _owners(
    tables: dict[int, list[int]], first: dict[int, int], lengths: dict[int, int], page_size: int
) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Sequences, and slots in use, by page."""
    owners: dict[int, tuple[int, ...]] = {}
    slots: dict[int, int] = {}
    for seq_id, table in tables.items():
        for i, page in enumerate(table):
            rest = lengths[seq_id] - first[seq_id] - i * page_size
            owners[page] = (*owners.get(page, ()), seq_id)
            slots[page] = max(slots.get(page, 0), min(rest, page_size))
    return owners, slots


def _states(
    cache: CacheInspection, index: int, stats: Mapping, lengths: dict[int, int], num_groups: int
) -> PageGroup:
    """The pages of a state group; a page has the last state of up to ``interval`` positions."""
    states = {seq_id: cache._state_table(seq_id, index) for seq_id in lengths}
    tables = {seq_id: pages for seq_id, (_, _, pages) in states.items()}
    ends = {seq_id: end for seq_id, (end, _, _) in states.items()}
    interval = stats["interval"]
    first = {seq_id: page * interval for seq_id, (_, page, _) in states.items()}
    layers = cache.description["recurrent_layers"]
    ids = tuple(layer["id"] for layer in layers if layer["state_group"] == index)
    cached = frozenset(cache.cached_pages(num_groups + index))
    pages = stats["num_pages"], tables, first, *_owners(tables, first, ends, interval), cached
    return PageGroup(ids, "states", 0, *pages, interval=interval)


def colour(index: int) -> str:
    """The colour of the sequence with the `index`-th smallest id."""
    if index < len(COLOURS):
        return COLOURS[index]
    hue = (index * 0.618034) % 1  # the golden ratio: neighbours lie far apart
    rgb = colorsys.hls_to_rgb(hue, (0.42, 0.55, 0.66)[index % 3], 0.5)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def bands(size: float, count: int) -> list[list[tuple[float, float]]]:
    """A square cut into `count` diagonal bands, each a polygon."""

    def cut(total: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return where the line x + y = total leaves the square: bottom left, then top right."""
        low, high = max(0.0, total - size), min(size, total)
        return (low, high), (high, low)

    polygons = []
    for i in range(count):
        begin, end = 2 * size * i / count, 2 * size * (i + 1) / count
        (a, b), (c, d) = cut(begin), cut(end)
        corners = [(0.0, size), (size, 0.0)] if begin < size < end else []
        # Around the band: its beginning, a corner it passes, its end, the other corner.
        polygons.append([b, a, *corners[:1], c, d, *corners[1:]])
    return polygons


class _Picture:
    """Draws from top to bottom; `y` is where the next thing goes."""

    def __init__(self, page_map: PageMap):
        self.map, self.y = page_map, MARGIN
        self.colours = {seq_id: colour(i) for i, seq_id in enumerate(page_map.lengths)}

    def lines(self) -> Iterator[str]:
        body = list(self._title())
        for name, index, group in self.map.panels():
            body += self._panel(name, index, group)
        body += self._legend()
        if self.map.prefixes:
            lines, self.y = panel_of(self.map.prefixes, len(self.map.groups), self.y + 12)
            body += lines
        height = self.y + MARGIN
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}">'
        )
        yield f"<style>{STYLE}</style>"
        yield f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        yield from body
        yield "</svg>"

    def _title(self) -> Iterator[str]:
        groups, tokens = self.map.groups, sum(self.map.lengths.values())
        used, total = sum(len(g.owners) for g in groups), sum(g.num_pages for g in groups)
        self.y += 16
        yield text_of(MARGIN, self.y, "title", f"{used:,} of {total:,} pages in use")
        self.y += 20
        text = f"{count_of(len(self.map.lengths), 'sequence')} with {count_of(tokens, 'token')}; "
        text += f"{sum(g.num_shared for g in groups):,} pages are shared; "
        text += f"{sum(len(g.cached) for g in groups):,} are cached; "
        text += f"a page holds {count_of(self.map.page_size, 'token')}"
        yield text_of(MARGIN, self.y, "small", text)
        self.y += 14

    def _panel(self, kind: str, index: int, group: PageGroup) -> Iterator[str]:
        page_size = group.interval or self.map.page_size
        mark = "s" if group.interval else "g"
        num_drawn = min(group.num_pages, MAX_PAGES_DRAWN)
        pitch, columns = _grid(num_drawn)
        size = pitch - max(1, pitch // 10)
        self.y += 24
        name = "layer " if len(group.layers) == 1 else "layers "
        text = f"{kind.capitalize()} {index}: {name}{ranges_of(group.layers)} ({group.shape})"
        yield f'<g class="panel" data-{kind.replace(" ", "-")}="{index}">'
        yield text_of(MARGIN, self.y, "heading", text)
        self.y += 17
        used, capacity = len(group.owners), len(group.owners) * page_size
        text = f"{used:,} of {group.num_pages:,} pages in use, {group.num_shared:,} shared"
        text += f", {len(group.cached):,} cached"
        if used and not group.interval:
            text += f", {sum(group.slots.values()) / capacity:.0%} of their slots filled"
        if num_drawn < group.num_pages:
            text += f"; pages from {num_drawn} on are not drawn"
        yield text_of(MARGIN, self.y, "small", text)
        self.y += 10

        symbols: dict[tuple[int, ...] | None, str] = {
            (): f"{mark}{index}free",
            None: f"{mark}{index}cached",
        }
        for owners in group.owners.values():
            symbols.setdefault(owners, f"{mark}{index}o{len(symbols)}")
        yield f'<defs><clipPath id="{mark}{index}clip">{square(size, size / 8, "#000")}</clipPath>'
        for drawn, symbol in symbols.items():
            yield self._symbol(symbol, drawn, size, f"{mark}{index}clip")
        yield "</defs>"
        for page in range(num_drawn):
            x, y = LABEL_WIDTH + page % columns * pitch, self.y + page // columns * pitch
            if page % columns == 0 and (pitch > 10 or page // columns % 4 == 0):
                yield text_of(LABEL_WIDTH - 6, y + size / 2 + 3, "label", str(page))
            yield from self._page(group, page, symbols, x, y, size)
        self.y += -(-num_drawn // columns) * pitch
        yield "</g>"

    def _symbol(self, symbol: str, owners: tuple[int, ...] | None, size: int, clip: str) -> str:
        """The square of pages with these owners; None: of cached pages."""
        if owners is None:
            return f'<g id="{symbol}" data-owners="" data-cached="">{_cached(size)}</g>'
        data = f'id="{symbol}" data-owners="{" ".join(map(str, owners))}"'
        if len(owners) < 2:
            paint = self.colours[owners[0]] if owners else FREE
            return f"<g {data}>{square(size, size / 8, paint)}</g>"
        # Of many owners the bands would be too thin to see: then the first ones stand for all.
        shown = owners[: max(2, size // 4)]
        banded = _banded(size, [self.colours[owner] for owner in shown])
        return f'<g {data}><g clip-path="url(#{clip})">{banded}</g></g>'

    def _page(
        self, group: PageGroup, page: int, symbols: dict, x: int, y: int, size: int
    ) -> Iterator[str]:
        owners, slots = group.owners.get(page, ()), group.slots.get(page, 0)
        symbol = symbols[None if page in group.cached else owners]
        place = f'<use href="#{symbol}" x="{x}" y="{y}" data-page="{page}"'
        if not owners:
            yield f"{place}/>"
            return
        who = ("sequence " if len(owners) == 1 else "sequences ") + ", ".join(map(str, owners))
        page_size = group.interval or self.map.page_size
        what = f"a state behind {slots} of its" if group.interval else f"{slots} of"
        unit = "positions" if group.interval else "slots"
        about = f"page {page}: {who}; {what} {page_size} {unit}"
        yield f'{place} data-slots="{slots}"><title>{about}</title></use>'
        empty = size * (1 - slots / page_size)
        if empty:
            yield (
                f'<rect x="{x}" y="{y}" width="{size}" height="{empty:g}" fill="#fff" '
                f'fill-opacity=".72"/>'
            )
        if size >= 26:
            place = f'x="{x + 3}" y="{y + size - 4}"'
            yield f'<text {place} class="id" font-size="8">{page}</text>'
        if len(owners) > 1 and size >= 13:
            cx, cy, font = x + size / 2, y + size / 2, size // 4 + 4
            yield f'<circle cx="{cx:g}" cy="{cy:g}" r="{0.58 * font + 1:g}" class="badge"/>'
            place = f'x="{cx:g}" y="{cy + 0.36 * font:g}"'
            yield f'<text {place} class="count" font-size="{font}">{len(owners)}</text>'

    def _legend(self) -> Iterator[str]:
        self.y += 30
        yield '<g class="legend">'
        yield text_of(MARGIN, self.y, "heading", "Sequences")
        self.y += 20
        entries = [
            (square(13, 2, self.colours[i]), f"{i}: {count_of(length, 'token')}")
            for i, length in list(self.map.lengths.items())[:MAX_SEQUENCES_NAMED]
        ]
        more = len(self.map.lengths) - len(entries)
        entries += [("", f"and {more} more")] if more else []
        half = square(13, 2, COLOURS[0])
        half += '<rect width="13" height="6.5" fill="#fff" fill-opacity=".72"/>'
        marks = [
            (square(13, 2, FREE), "free"),
            (_cached(13), "cached: kept until the page is needed"),
            (_banded(13, COLOURS[:2]), "shared: the number counts its sequences"),
            (half, "partly filled"),
        ]
        for block in (entries, marks):
            columns = LEGEND_COLUMNS
            for i, (sample, text) in enumerate(block):
                x = MARGIN + i % columns * ((WIDTH - 2 * MARGIN) // columns)
                y = self.y + i // columns * LEGEND_LINE
                yield f'<g transform="translate({x},{y - 11})">{sample}</g>'
                yield text_of(x + 20, y, "small", text)
            self.y += -(-len(block) // columns) * LEGEND_LINE + 8
        self.y -= LEGEND_LINE
        yield "</g>"


def _cached(size: int) -> str:
    """A frame in the place of a filled square."""
    edge = max(1.0, size / 6)
    return (
        f'<rect x="{edge / 2:g}" y="{edge / 2:g}" width="{size - edge:g}" '
        f'height="{size - edge:g}" rx="{size / 8:g}" fill="{FREE}" stroke="{CACHED}" '
        f'stroke-width="{edge:g}"/>'
    )


def _banded(size: int, paints: Sequence[str]) -> str:
    return "".join(
        f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in polygon)}" fill="{paint}"/>'
        for paint, polygon in zip(paints, bands(size, len(paints)), strict=True)
    )


def _grid(num_pages: int) -> tuple[int, int]:
    """Distance of pages, and how many lie in a row: a multiple of 8."""
    for pitch in PITCHES:
        columns = (WIDTH - LABEL_WIDTH - MARGIN) // pitch // 8 * 8
        if -(-num_pages // columns) * pitch <= MAX_PANEL_HEIGHT:
            break
    return pitch, columns
