# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/architecture.md, docs/internals.md and docs/sequences.md as SVG files.

python scripts/tools/draw_docs.py [FOLDER = docs/images]
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

INK, GREY = "#1f2933", "#7b8794"
FILLS = {
    "caller": "#eceff3",
    "host": "#dbe9fb",
    "kernel": "#fde5cc",
    "memory": "#d9f0dd",
    "plain": "#ffffff",
}
LINE = 17  # height of a line of text


class Drawing:
    """Boxes, arrows and text; coordinates in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x, y, line, size=13, anchor="start", color=INK, bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(line)}</text>'
        )

    def box(self, x, y, width, height, title, lines=(), fill="plain", dashed=False):
        """A box with a bold title and lines of text; without lines the title is in the middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'fill="{FILLS[fill]}" stroke="{GREY}"{dash}/>'
        )
        if not lines and not dashed:
            self.text(x + width / 2, y + height / 2 + 5, title, anchor="middle", bold=True)
            return
        self.text(x + 10, y + 20, title, bold=True)
        for number, line in enumerate(lines):
            self.text(x + 10, y + 22 + LINE * (number + 1), line, size=12)

    def arrow(self, *points, label="", at=None, anchor="middle", dashed=False):
        """A line through points, with a head at the last one and a label at `at`."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.3"{dash} '
            'marker-end="url(#head)"/>'
        )
        if label:
            (x1, y1), (x2, y2) = points[0], points[-1]
            x, y = at or ((x1 + x2) / 2, (y1 + y2) / 2 - 6)
            for number, line in enumerate(label.split("\n")):
                self.text(x, y + 15 * number, line, size=12, anchor=anchor, color="#3e4c59")

    def svg(self) -> str:
        body = "\n".join(self.parts)
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" \
font-family="system-ui, sans-serif">
<title>{escape(self.title)}</title>
<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">\
<path d="M0,0 L9,4 L0,8 z" fill="{INK}"/></marker></defs>
<rect width="100%" height="100%" fill="#ffffff"/>
{body}
</svg>
"""


def components() -> Drawing:
    d = Drawing(920, 640, "The components of tvm_pagedkv")
    d.text(20, 28, "Python: every row uses those below", bold=True, size=15)
    d.box(20, 44, 688, 36, "tvm_pagedkv_lm: language models, and the command line", fill="caller")
    d.box(724, 44, 160, 36, "mlc", fill="caller")
    for i, name in enumerate(("relax", "cache", "bundle", "distributed", "transfer")):
        d.box(20 + 176 * i, 120, 160, 36, name, fill="caller")
    d.box(20, 196, 336, 36, "compiler", fill="caller")
    d.box(372, 196, 160, 36, "config", fill="caller")
    for x in (276, 452):
        d.arrow((x, 80), (x, 118))
        d.arrow((x, 156), (x, 194))
    d.text(20, 280, "tir_kernels (TVMScript)", bold=True, size=15)
    d.box(
        20,
        296,
        336,
        124,
        "spec in, PrimFunc out",
        [
            "signatures: arguments of every kernel",
            "semantics: masks, RoPE, softmax constants",
            "moves: append, copy, merge",
            "cpu: SIMD kernels",
            "cuda: tensor-core kernels and launchers",
        ],
        fill="kernel",
    )
    d.arrow((300, 232), (300, 294), label="builds", at=(290, 258), anchor="end")
    d.text(396, 280, "runtime_ext (C++): libtvm_pagedkv.so", bold=True, size=15)
    d.box(396, 296, 504, 36, "ffi: guards the cache object, delegates", fill="host")
    for i, name in enumerate(("attention", "checkpoint", "transfer", "inspect", "bundle")):
        d.box(396 + 102 * i, 364, 96, 36, name, fill="host")
        d.arrow((444 + 102 * i, 332), (444 + 102 * i, 362))
    d.box(396, 432, 402, 36, "step: plan, arrays, workspaces, stream", fill="host")
    d.box(396, 500, 402, 36, "storage: the pages of the layers", fill="host")
    d.box(396, 568, 196, 36, "device", fill="host")
    d.box(602, 568, 196, 36, "config", fill="host")
    for x in (444, 546, 648, 750):
        d.arrow((x, 400), (x, 430))
    d.arrow((597, 468), (597, 498))
    d.arrow((494, 536), (494, 566))
    d.arrow((700, 536), (700, 566))
    d.box(
        816, 432, 84, 172, "state", ["std only:", "page pool,", "sequences,", "windows,", "trees,",
        "plans"], fill="memory",
    )  # fmt: skip
    d.arrow((798, 450), (814, 450))
    d.arrow((798, 518), (814, 518))
    d.arrow((800, 156), (800, 294), label="global functions", at=(790, 216), anchor="end")
    d.arrow((396, 382), (358, 382), dashed=True)
    d.text(188, 444, "the runtime calls compiled kernels (dashed)", size=12, anchor="middle")
    return d


def step() -> Drawing:
    d = Drawing(920, 860, "The data of one step")
    lanes = ((20, 180, "caller"), (215, 330, "runtime, on the host"), (560, 340, "device"))
    for x, width, name in lanes:
        d.text(x + width / 2, 28, name, bold=True, size=15, anchor="middle")
    d.box(20, 50, 180, 60, "begin_forward", ["seq_ids, lengths, parents"], fill="caller")
    d.box(
        215, 50, 330, 112, "plan (state/, step/)", [
            "ids known? lengths positive? tree valid?",
            "which slots, which pages, which copies?",
            "pages enough?",
            "A failure ends here: nothing has changed.",
        ], fill="host",
    )  # fmt: skip
    d.box(
        215, 182, 330, 78, "take pages (state/)", [
            "free ones first, then the least recently",
            "used cached ones (reclaimed)",
        ], fill="host",
    )  # fmt: skip
    d.box(560, 182, 340, 78, "copy_pages", ["copies shared pages that the step", "writes to "
          "(copy on write)"], fill="kernel")  # fmt: skip
    d.box(
        215, 280, 330, 128, "int32 arrays, in one pinned buffer", [
            "query indptr, positions: which rows",
            "slots: where each row is written",
            "page indptr, page ids, last page length",
            "tree order; segments of shared pages",
            "(device/: a ring of four buffers)",
        ], fill="host",
    )  # fmt: skip
    d.box(560, 310, 340, 60, "the same arrays", ["one copy (none on a CPU)"], fill="memory")
    d.arrow((200, 80), (213, 80))
    d.arrow((380, 162), (380, 180))
    d.arrow((545, 221), (558, 221))
    d.arrow((380, 260), (380, 278))
    d.arrow((545, 340), (558, 340))

    d.box(10, 430, 900, 310, "for each layer", dashed=True)
    d.box(20, 470, 180, 78, "attention(layer, qkv)", ["qkv [rows, Hq + 2 Hk, D]", ""],
          fill="caller")  # fmt: skip
    d.box(215, 470, 330, 78, "the layer's backend (attention/)", ["checks shapes, chooses",
          "kernels: decode, prefill or tree"], fill="host")  # fmt: skip
    d.box(560, 450, 340, 60, "rope_append", ["rotates; q to a workspace, K and V to slots"],
          fill="kernel")  # fmt: skip
    d.box(560, 525, 160, 44, "q", fill="memory")
    d.box(740, 525, 160, 44, "pages", fill="memory")
    d.box(
        560, 584, 340, 78, "decode / prefill / tree_paged", [
            "own pages, split over threads or blocks;",
            "prefill_shared: shared pages, read once",
        ], fill="kernel",
    )  # fmt: skip
    d.box(560, 677, 340, 50, "merge, apply_sinks", ["partial states (o, lse) to one o"],
          fill="kernel")  # fmt: skip
    d.arrow((200, 500), (213, 500))
    d.arrow((545, 485), (558, 485))
    for x in (640, 820):
        d.arrow((x, 510), (x, 523))
        d.arrow((x, 569), (x, 582))
    d.arrow((730, 662), (730, 675))
    d.box(20, 677, 180, 50, "o", ["[rows, Hq, D]"], fill="caller")
    d.arrow((560, 702), (202, 702))

    d.box(20, 760, 180, 60, "end_forward", [""], fill="caller")
    d.box(215, 760, 330, 78, "close the step", ["windows slide: pages left behind are cached",
          "senders are told that rows are ready"], fill="host")  # fmt: skip
    d.arrow((200, 790), (213, 790))
    d.box(560, 770, 340, 44, "pages: K and V for the next step", fill="memory")
    d.arrow((545, 792), (558, 792), dashed=True)
    return d


def page_states() -> Drawing:
    d = Drawing(760, 300, "A page is free, held or cached")
    d.box(30, 110, 150, 80, "free", ["content unknown", "available"], fill="plain")
    d.box(310, 110, 160, 80, "held", ["owners: sequences,", "transfers"], fill="host")
    d.box(590, 110, 150, 80, "cached", ["content known", "available"], fill="memory")
    takes, passed = (
        "a step, import or\nreceive takes it",
        "its last sequence is\nremoved; a window\npassed it",
    )
    d.arrow((180, 135), (308, 135), label=takes, at=(244, 98))
    d.arrow((310, 168), (182, 168), label="pop_n, clear,\nabort_forward", at=(246, 192))
    d.arrow((470, 135), (588, 135), label=passed, at=(529, 84))
    d.arrow((590, 168), (472, 168), label="a fork or pop\ngoes back to it", at=(531, 192))
    reclaimed = "reclaimed for other positions, least recently used first"
    d.arrow((640, 190), (640, 262), (390, 262), (390, 192), label=reclaimed, at=(515, 282))
    fork = "fork: one owner more; a write to a page with several owners copies it"
    d.arrow((350, 110), (350, 62), (430, 62), (430, 108), label=fork, at=(390, 50))
    d.arrow((665, 110), (665, 22), (105, 22), (105, 108), label="clear", at=(140, 18))
    return d


def buffer_ring() -> Drawing:
    d = Drawing(900, 230, "The ring of four buffers")
    for row, name in enumerate(("host writes arrays", "copy streams", "compute stream")):
        d.text(20, 62 + 60 * row, name, bold=True)
    width, gap = 146, 10
    for number in range(4):
        x = 170 + (width + gap) * number
        d.box(x, 36, width, 40, f"step {number}: buffer {number}", fill="host")
        d.box(x + 56, 96, 60, 40, "copy", fill="memory")
        d.box(x + 100, 156, width, 40, f"kernels of step {number}", fill="kernel")
        d.arrow((x + 86, 76), (x + 86, 94))
        d.arrow((x + 106, 136), (x + 120, 154))
    last = "Step 4 writes to buffer 0 again: the host blocks only if it is three steps ahead."
    d.text(20, 220, last, size=12)
    return d


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "images"
    for draw in (components, step, page_states, buffer_ring):
        name = draw.__name__.replace("_", "-") + ".svg"
        (folder / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
