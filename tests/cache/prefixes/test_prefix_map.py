# SPDX-License-Identifier: Apache-2.0
"""Where the pages of a prefix are: what `locate_prefix` says, and what the page map draws."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tvm_pagedkv.cache.page_map import PageMap

from ...support.cases.kernels.kernel_specs import parametrize_seed
from ...support.emulators.dict_store import DictStore, HangingStore
from .test_prefix_cache import Texts
from .test_prefix_tiers import MB, SMALL, TieredTexts

SVG = "{http://www.w3.org/2000/svg}"
PROMPT = list(range(30))  # seven full pages of four


def stored_texts(store=None, **fields) -> TieredTexts:
    store = DictStore() if store is None else store
    return TieredTexts(tiers={"store": store, "model_id": "m"}, **fields)


def test_pages_move_down_tier_by_tier():
    store = DictStore()
    texts = stored_texts(store)
    locate = texts.cache.locate_prefix
    assert locate(PROMPT) == [("",)] * 7
    texts.once(PROMPT)
    assert texts.cache.flush_prefixes(60)
    before = texts.cache.stats()
    assert locate(PROMPT) == locate(PROMPT[:28]) == [("pool",)] * 7
    texts.cache.clear()
    assert locate(PROMPT) == [("host",)] * 7
    assert locate([*PROMPT[:10], 99, *PROMPT[11:]], timeout=60) == [("host",)] * 2 + [("",)] * 5
    texts.cache.add_sequence(0, PROMPT[:9])
    assert locate(PROMPT) == [("pool",)] * 2 + [("host",)] * 5
    texts.cache.remove_sequence(0)
    texts.cache.forget_prefixes()
    assert locate(PROMPT, timeout=60) == [("store",)] * 7
    assert locate(PROMPT, b"salt", timeout=60) == [("",)] * 7
    del store.values[list(store.values)[3]]  # pages are written in their order
    assert locate(PROMPT, timeout=60) == [("store",)] * 3 + [("",)] + [("store",)] * 3
    assert locate(PROMPT[:3]) == locate([]) == []
    # Nothing was loaded, and lookups do not count.
    assert "get" not in [name for name, _ in store.calls]
    assert texts.tiers["num_fetched_pages"] == texts.tiers["num_host_pages"] == 0
    assert texts.cache.stats()["num_prefix_lookups"] == before["num_prefix_lookups"] + 1
    texts.cache.check_integrity()
    assert texts.cache.close_prefixes(60)
    assert locate(PROMPT, timeout=60) == [("",)] * 7


def test_caches_without_tiers():
    texts = Texts(**SMALL)
    texts.run(0, PROMPT)
    texts.finish(0)
    assert texts.cache.locate_prefix([*PROMPT[:8], *PROMPT]) == [("pool",)] * 2 + [("",)] * 7


@parametrize_seed
def test_the_leading_pages_are_what_is_reused(seed):
    rng = np.random.default_rng(seed)
    texts = stored_texts(max_total_tokens=100)
    prompts = [rng.integers(3, size=60).tolist() for _ in range(4)]
    seen = set()
    for _ in range(40):
        prompt = prompts[rng.integers(4)][: int(rng.integers(1, 60))]
        found = texts.cache.locate_prefix(prompt, timeout=60)
        assert len(found) == len(prompt) // 4
        num_near = next((i for i, (tier,) in enumerate(found) if tier not in ("pool", "host")),
                        len(found))  # fmt: skip
        num_all = next((i for i, (tier,) in enumerate(found) if not tier), len(found))
        # The pool may have the beginning of the page behind, and the last token is computed.
        assert texts.cache.match_prefix(prompt) // 4 == min(num_near, (len(prompt) - 1) // 4)
        reused = texts.cache.add_sequence(9, prompt, lookup_timeout=60)
        texts.cache.remove_sequence(9)
        assert reused // 4 == min(num_all, (len(prompt) - 1) // 4)
        texts.once(prompt, check=False)
        if rng.random() < 0.2:
            assert texts.cache.flush_prefixes(60)
            texts.cache.forget_prefixes()
        seen |= {tier for (tier,) in found}
    assert seen == {"", "pool", "host", "store"}
    assert texts.cache.close_prefixes(60)


def test_groups_have_tiers_of_their_own():
    texts = stored_texts(windows=(0, 6), max_total_tokens=96)
    texts.once(list(range(60)), check=False)
    texts.once([*range(40), 1, 2], check=False)
    found = texts.cache.locate_prefix(list(range(40)))
    assert len(found) == 10 and {len(tiers) for tiers in found} == {2}
    assert {tiers[0] for tiers in found} == {"pool"}
    assert {tiers[1] for tiers in found} <= {"pool", "host"} != {"pool"}
    assert texts.cache.close_prefixes(60)


def test_a_store_that_hangs_is_not_waited_for():
    store = HangingStore()
    store.release.set()
    texts = stored_texts(store)
    texts.once(PROMPT)
    assert texts.cache.flush_prefixes(60)
    texts.cache.forget_prefixes()
    store.release.clear()
    assert texts.cache.locate_prefix(PROMPT, timeout=0.05) == [("",)] * 7
    # The question is still open; a lookup of the same pages is another one, which loads.
    texts.cache.prefetch(PROMPT)
    store.release.set()
    deadline = time.monotonic() + 60
    while texts.tiers["num_host_pages"] < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert texts.cache.add_sequence(0, PROMPT) == 28
    assert texts.cache.locate_prefix(PROMPT) == [("pool",)] * 7
    assert texts.cache.close_prefixes(60)


def test_errors():
    texts = stored_texts()
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must be at least 0 seconds"):
            texts.cache.locate_prefix(PROMPT, timeout=timeout)
    with pytest.raises(TypeError, match="tokens must be integers"):
        texts.cache.locate_prefix("text")
    with pytest.raises(ValueError, match="token ids must be"):
        texts.cache.locate_prefix([-1])
    texts.cache.add_sequence(0)
    with pytest.raises(ValueError, match="end_forward"), texts.cache.forward([0], [1]):
        texts.cache.locate_prefix(PROMPT)
    assert texts.cache.close_prefixes(60)


# --- the picture --------------------------------------------------------------------------------


def panel_of(svg: str) -> tuple[dict[tuple[str, int], list[str]], list[str], ElementTree.Element]:
    """Tiers of the pages by prefix and group, in their order, and the texts of the panel."""
    root = ElementTree.fromstring(svg)
    (panel,) = (g for g in root.iter(f"{SVG}g") if g.get("class") == "prefixes")
    symbols = {g.get("id"): g.get("data-tier") for g in panel.iter(f"{SVG}g") if g.get("id")}
    rows = {}
    for row in panel.iter(f"{SVG}g"):
        if row.get("data-prefix") is None:
            continue
        uses = list(row.iter(f"{SVG}use"))
        assert [int(use.get("data-block")) for use in uses] == list(range(len(uses)))
        places = {(use.get("x"), use.get("y")) for use in uses}
        assert len(places) == len(uses)
        key = row.get("data-prefix"), int(row.get("data-group"))
        rows[key] = [symbols[use.get("href")[1:]] for use in uses]
    texts = [text.text for text in panel.iter(f"{SVG}text")]
    return rows, texts, root


def test_the_picture_says_where_prefixes_are(tmp_path):
    texts = stored_texts(max_total_tokens=96)
    texts.once(PROMPT)
    other = [*PROMPT[:8], *range(60, 72), 5]
    texts.once(other)
    assert texts.cache.flush_prefixes(60)
    texts.cache.forget_prefixes()
    texts.cache.add_sequence(0, PROMPT[:17], lookup_timeout=60)
    texts.cache.remove_sequence(0)
    texts.cache.clear()
    texts.cache.add_sequence(0, PROMPT[:9])
    prefixes = {"a & b": PROMPT, "other": other, "new": [7] * 5, "short": [1, 2]}
    path = tmp_path / "pages.svg"
    text = texts.cache.draw(path, prefixes)
    rows, lines, root = panel_of(path.read_text(encoding="utf-8"))
    for name, tokens in prefixes.items():
        expected = [tier for (tier,) in texts.cache.locate_prefix(tokens, timeout=60)]
        assert rows[name, 0] == expected
    assert rows["a & b", 0] == ["pool"] * 2 + ["host"] * 2 + ["store"] * 3
    assert rows["new", 0] == [""] and rows["short", 0] == []
    assert (
        "a & b: 30 tokens; 2 pages in the pool; 2 pages in host memory; 3 pages in the store"
        in lines
    )
    assert text.splitlines()[-4:] == [
        "prefix a & b (30), group 0: pool 0-1, host 2-3, store 4-6",
        "prefix other (21), group 0: pool 0-1, store 2-4",
        "prefix new (5), group 0: nowhere 0",
        "prefix short (2), group 0: no full page",
    ]
    height = int(root.get("height"))
    assert all(int(use.get("y")) + 12 <= height for use in root.iter(f"{SVG}use"))
    # Without prefixes the picture is as before.
    plain = texts.cache.draw(path)
    assert "prefixes" not in path.read_text(encoding="utf-8") and text.startswith(plain)
    assert texts.cache.close_prefixes(60)


def test_each_group_has_a_row():
    texts = stored_texts(windows=(0, 6), max_total_tokens=96)
    texts.once(list(range(40)), check=False)
    page_map = PageMap.of(texts.cache, {"p": list(range(40))})
    rows, lines, _ = panel_of(page_map.to_svg())
    found = texts.cache.locate_prefix(list(range(40)))
    for group in range(2):
        assert rows["p", group] == [tiers[group] for tiers in found]
    assert any("p: 40 tokens, group 1; " in line for line in lines)
    assert page_map.to_text().count("prefix p (40), group ") == 2
    assert texts.cache.close_prefixes(60)


def test_many_and_long_prefixes():
    texts = TieredTexts(tiers={"host_bytes": MB})
    prefixes = {str(i): [i] * (40_000 if i == 0 else 300) for i in range(40)}
    rows, lines, root = panel_of(PageMap.of(texts.cache, prefixes, b"s").to_svg())
    assert len(rows) == 32 and "and 8 more" in lines
    assert len(rows["0", 0]) == 4096 and "those from 4096 on are not drawn" in lines[1]
    assert len(rows["31", 0]) == 75
    ys = [int(use.get("y")) for use in root.iter(f"{SVG}use") if use.get("data-block")]
    assert max(ys) + 12 < int(root.get("height"))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
