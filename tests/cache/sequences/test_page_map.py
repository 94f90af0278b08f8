# SPDX-License-Identifier: Apache-2.0
"""The picture of the pages says what the page tables say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.cache.page_map import PageMap, bands, colour

from ... import reference
from ...support.cases.caches.quantized_cache_cases import LAYER as QUANTIZED_LAYER
from ...support.cases.caches.quantized_cache_cases import make_quantized
from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    shuffle,
)
from ...support.worlds.permissive_steps import permissive_step

SVG = "{http://www.w3.org/2000/svg}"
WINDOWS = {"one": (0, 0), "two": (0, 20, 0), "sliding": (7,)}


def layer_of(window: int) -> dict:
    return {**LAYER, "kind": "mha_sliding", "window": window} if window else LAYER


def random_cache(seed: int, page_size: int, windows: tuple[int, ...], num_pages: int = 60):
    """A cache after some steps and forks, with the lengths that its sequences must have."""
    rng = np.random.default_rng(seed)
    cache = make_cache(
        layers=[layer_of(window) for window in windows],
        max_num_sequences=12,
        max_total_tokens=num_pages * page_size,
        page_size=page_size,
        prefill_chunk_size=256,
    )
    shuffle(cache, seed)
    expected = reference.ReferenceCache(len(windows), np.dtype("float32"), windows=windows)
    for seq_id in (int(i) for i in rng.permutation(np.arange(-4, 8))):
        parents = list(expected.sequences)
        try:
            if parents and rng.random() < 0.6:
                parent = int(rng.choice(parents))
                cache.fork_sequence(parent, seq_id)
                expected.fork_sequence(parent, seq_id, -1)
            else:
                cache.add_sequence(seq_id)
                expected.add_sequence(seq_id)
            length = int(rng.integers(1, 5 * page_size))
            if rng.random() < 0.8:
                with permissive_step(cache, [seq_id], [length]):
                    pass
                rows = rng.standard_normal((length, 8, 8)).astype("float32")
                for layer in range(len(windows)):
                    expected.attention(layer, [seq_id], [length], rows, 2, 1.0)
        except pkv.CacheFullError:
            break
    return cache, expected


def parse(svg: str):
    """The picture, and of each panel its pages: owners and slots by id, each page once."""
    root = ElementTree.fromstring(svg)
    panels = []
    for panel in root.iter(f"{SVG}g"):
        if panel.get("class") != "panel":
            continue
        symbols = {g.get("id"): g for g in panel.iter(f"{SVG}g") if g.get("id")}
        pages = {}
        for use in panel.iter(f"{SVG}use"):
            page, symbol = int(use.get("data-page")), symbols[use.get("href")[1:]]
            assert page not in pages
            owners = tuple(map(int, symbol.get("data-owners").split()))
            if symbol.get("data-cached") is not None:
                owners = "cached"
            pages[page] = owners, int(use.get("data-slots", 0))
        panels.append((panel, symbols, pages))
    return root, panels


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_pages_are_those_of_the_page_tables(seed, page_size, windows):
    cache, expected = random_cache(seed, page_size, WINDOWS[windows])
    root, panels = parse(PageMap.of(cache).to_svg())
    stats = cache.stats()
    assert len(panels) == len(stats["groups"])
    ids = sorted(expected.sequences)
    assert len(ids) > 3
    for index, (_, _, pages) in enumerate(panels):
        assert sorted(pages) == list(range(stats["groups"][index]["num_pages"]))
        cached = cache.cached_pages(index)
        assert len(cached) == stats["groups"][index]["num_cached_pages"]
        owners = {page: "cached" if page in cached else () for page in pages}
        slots = dict.fromkeys(pages, 0)
        for seq_id in ids:
            first = cache.first_position(seq_id, index)
            for i, page in enumerate(cache.page_table(seq_id, index)):
                begin = first + i * page_size
                end = min(begin + page_size, expected.length(seq_id))
                assert owners[page] != "cached"
                owners[page] += (seq_id,)
                slots[page] = max(slots[page], end - begin)
        assert pages == {page: (owners[page], slots[page]) for page in pages}
        shared = sum(len(who) > 1 for who, _ in pages.values() if who != "cached")
        assert shared == stats["groups"][index]["num_shared_pages"]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == f"{stats['num_used_pages']} of {stats['num_pages']} pages in use"
    total = sum(expected.length(seq_id) for seq_id in ids)
    assert texts[1].startswith(f"{len(ids)} sequences with {total:,} tokens; ")
    assert f"{stats['num_shared_pages']} pages are shared" in texts[1]
    for seq_id in ids:
        length = expected.length(seq_id)
        assert f"{seq_id}: {length:,} token{'' if length == 1 else 's'}" in texts


def test_colours_are_those_of_the_legend():
    cache, expected = random_cache(1, 16, (0, 0))
    root, [(panel, symbols, pages)] = parse(PageMap.of(cache).to_svg())
    paint = {seq_id: colour(i) for i, seq_id in enumerate(sorted(expected.sequences))}
    for symbol in symbols.values():
        owners = [int(i) for i in symbol.get("data-owners").split()]
        shapes = [x for x in symbol.iter() if x.get("fill")]
        if symbol.get("data-cached") is not None:
            assert [x.get("stroke") for x in shapes] == ["#b9c2cc"]
            continue
        assert [x.get("fill") for x in shapes] == ([paint[i] for i in owners] or ["#eef1f4"])
        assert {x.tag for x in shapes} == {SVG + ("polygon" if len(owners) > 1 else "rect")}
    counts = [int(x.text) for x in panel.iter(f"{SVG}text") if x.get("class") == "count"]
    assert counts == [len(who) for _, (who, _) in sorted(pages.items()) if len(who) > 1] != []
    (legend,) = (g for g in root.iter(f"{SVG}g") if g.get("class") == "legend")
    fills = [rect.get("fill") for rect in legend.iter(f"{SVG}rect")]
    assert fills[: len(paint)] == list(paint.values())


def test_the_empty_part_of_a_page_is_pale():
    cache = make_cache(max_total_tokens=64, page_size=16)
    cache.add_sequence(3)
    with permissive_step(cache, [3], [20]):
        pass
    _, [(panel, symbols, pages)] = parse(PageMap.of(cache).to_svg())
    assert pages == {0: ((3,), 16), 1: ((3,), 4), 2: ((), 0), 3: ((), 0)}
    (pale,) = (rect for rect in panel.iter(f"{SVG}rect") if rect.get("fill-opacity"))
    (page,) = (use for use in panel.iter(f"{SVG}use") if use.get("data-page") == "1")
    assert (pale.get("x"), pale.get("y")) == (page.get("x"), page.get("y"))
    size = float(pale.get("width"))
    assert float(pale.get("height")) == pytest.approx(size * 12 / 16)


@pytest.mark.parametrize("num_pages", [1, 10, 100, 10_000, 70_000])
def test_any_number_of_pages_is_readable(num_pages):
    cache = make_cache(max_total_tokens=num_pages * 4, max_num_sequences=40)
    for seq_id in range(35):
        cache.add_sequence(seq_id)
        if cache.num_available_pages():
            with permissive_step(cache, [seq_id], [1]):
                pass
    svg = PageMap.of(cache).to_svg()
    root, [(panel, symbols, pages)] = parse(svg)
    assert len(pages) == min(num_pages, 1 << 16)
    assert ("are not drawn" in svg) == (len(pages) < num_pages)
    assert "and 5 more" in svg
    width, height = (int(root.get(side)) for side in ("width", "height"))
    assert width == 960 and (num_pages > 10_000 or height < 1100)
    places = [(int(use.get("x")), int(use.get("y"))) for use in panel.iter(f"{SVG}use")]
    assert len(set(places)) == len(pages)
    (one,) = (int(s[0].get("width")) for s in symbols.values() if s.get("data-owners") == "0")
    assert one >= (3 if num_pages > 10_000 else 6)
    assert all(0 <= x <= width - one and 0 <= y <= height - one for x, y in places)
    assert len(svg) < 100 * num_pages + 20_000


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_bands_part_the_square(count):
    size = 12.0

    def area(polygon) -> float:
        following = polygon[1:] + polygon[:1]
        pairs = zip(polygon, following, strict=True)
        return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs) / 2

    polygons = bands(size, count)
    areas = [abs(area(polygon)) for polygon in polygons]
    assert len(areas) == count and min(areas) > 0
    assert sum(areas) == pytest.approx(size**2)
    for i, polygon in enumerate(polygons):
        for x, y in polygon:
            assert 0 <= x <= size and 0 <= y <= size
            assert i / count - 1e-9 <= (x + y) / (2 * size) <= (i + 1) / count + 1e-9


def test_colours_differ():
    colours = [colour(i) for i in range(60)]
    assert len(set(colours)) == 60
    rgb = {c: np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in colours[:8]}
    assert min(np.abs(rgb[a] - rgb[b]).sum() for a, b in combinations(rgb, 2)) > 60


def test_mla_layers_have_a_panel_of_their_own():
    kernels = [MLA_KERNELS, KERNELS]
    layers = [{**MLA_LAYER, "kernel_set": 0}, {**LAYER, "kernel_set": 1}]
    cache = make_cache(kernels, layers=layers)
    root, panels = parse(PageMap.of(cache).to_svg())
    headings = [x.text for x in root.iter(f"{SVG}text") if x.get("class") == "heading"]
    assert headings == ["Group 0: layer 0 (mla)", "Group 1: layer 1 (mha)", "Sequences"]


def test_quantized_layers_are_named():
    cache = make_quantized([QUANTIZED_LAYER, QUANTIZED_LAYER], ["int8", "float32"])
    cache.add_sequence(0)
    text = cache.draw()
    assert "0 of 16 pages in use, int8" in text and text.count("int8") == 1
    root, _ = parse(PageMap.of(cache).to_svg())
    headings = [x.text for x in root.iter(f"{SVG}text") if x.get("class") == "heading"]
    assert headings == ["Group 0: layer 0 (mha, int8)", "Group 1: layer 1 (mha)", "Sequences"]


def test_draw_writes_a_file_and_returns_text(tmp_path):
    cache, _ = random_cache(0, 4, (0, 9))
    text = cache.draw()
    assert text.count("group ") == 2 and "<svg" not in text
    path = tmp_path / "pages.svg"
    assert cache.draw(path) == cache.draw(str(path)) == text
    assert path.read_text(encoding="utf-8") == PageMap.of(cache).to_svg()
    with pytest.raises(FileNotFoundError):
        cache.draw(tmp_path / "no" / "pages.svg")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
