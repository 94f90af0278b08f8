# SPDX-License-Identifier: Apache-2.0
"""Checkpoint metadata: false claims are refused, and the layout decides who may read it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tvm

from ..support.cases.caches.checkpoint_cases import (
    Fed,
    call,
    empty_groups,
    export,
    fed_in_chunks,
    restore,
)
from ..support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    snapshot,
)


def test_metadata_says_what_the_groups_are():
    source = fed_in_chunks("all", (21, 14))
    metadata = json.loads(call("get_checkpoint_metadata", source.cache, 3))
    assert metadata["seq_id"] == 3 and metadata["seq_length"] == 35
    assert metadata["layout_hash"] == call("get_layout_hash", source.cache)
    assert [page["start_pos"] for page in metadata["logical_pages"]] == list(range(0, 35, 4))
    assert metadata["logical_pages"][-1]["length"] == 3
    for layer, group in enumerate(metadata["groups"]):
        expected = source.expected_group(3, layer)
        assert group["shape"] == list(expected.shape) and group["nbytes"] == expected.nbytes
    # The window of 7 keeps 22 positions: position 13 is in page 3.
    assert [group["first_position"] for group in metadata["groups"]] == [12, 0, 0]


def _mutate(metadata: dict, path: str, value) -> str:
    changed = json.loads(json.dumps(metadata))
    *way, last = path.split(".")
    place = changed
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    last = int(last) if last.isdigit() else last
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(changed)


LIES = {
    "version": ("format_version", 2, "format_version must be 1, got 2"),
    "no_version": ("format_version", KeyError, "lacks the field 'format_version'"),
    "cache_type": ("cache_type", "rnn", "cache_type must be"),
    "unknown": ("windows", 3, "unknown field 'windows'"),
    "length_type": ("seq_length", "14", "expected a number"),
    "length_float": ("seq_length", 14.0, "expected an integer"),
    "length_bool": ("seq_length", True, "expected a number"),
    "length_null": ("seq_length", None, "expected a number"),
    "length_list": ("seq_length", [14], "expected a number"),
    "length_huge": ("seq_length", 10**30, "integer of 64 bits"),
    "length_64": ("seq_length", 2**63 - 1, "seq_length must be between"),
    "length_min": ("seq_length", -(2**63), "seq_length must be between"),
    "length_31": ("seq_length", 2**31, "seq_length must be between"),
    "length_more": ("seq_length", 15, "cover 14 positions"),
    "length_less": ("seq_length", 13, "cover 14 positions"),
    "page_missing": ("logical_pages.1", KeyError, "does not follow"),
    "page_last": ("logical_pages.3", KeyError, "cover 12 positions"),
    "page_order": ("logical_pages.0.logical_page_index", 1, "does not follow"),
    "page_long": ("logical_pages.2.length", 5, "does not follow"),
    "page_zero": ("logical_pages.0.length", 0, "does not follow"),
    "page_huge": ("logical_pages.0.length", 2**62, "does not follow"),
    "groups_none": ("groups", [], "a group for each of the 5 layers, got 0"),
    "group_missing": ("groups.4", KeyError, "a group for each of the 5 layers, got 4"),
    "group_index": ("groups.1.group_index", 0, "group_index of group 1 must be 1, got 0"),
    "group_dtype": ("groups.1.dtype", "float16", "shape or dtype of group 1"),
    "group_shape": ("groups.1.shape.1", 9, "shape or dtype of group 1"),
    "group_rank": ("groups.1.shape", [1, 4], "shape or dtype of group 1"),
    "group_pages": ("groups.1.num_logical_pages", 9, "num_logical_pages of group 1"),
    "group_bytes": ("groups.1.nbytes", 2**40, "nbytes of group 1 must be"),
    "group_first": ("groups.0.first_position", 4, "num_logical_pages of group 0 must be 3"),
    "group_odd": ("groups.0.first_position", 3, "that of a page"),
    "group_far": ("groups.0.first_position", 2**62, "that of a page"),
    "group_before": ("groups.0.first_position", -4, "that of a page"),
    "page_size": ("page_size", 8, "do not agree"),
    "kinds": ("attn_kinds.1", "mha", "do not agree"),
    "dtype": ("dtype", "float16", "do not agree"),
    "hash": ("layout_hash", "0" * 16, "another layout"),
    "layout": ("layout", "page_size=4", "another layout"),
    "layout_text": ("layout", "\x00", "printable ASCII"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_metadata_that_lies(name):
    path, value, text = LIES[name]
    metadata = json.loads(export(fed_in_chunks("mixed", (9, 5)).cache, 3)[0])
    target = Fed("mixed")
    before = snapshot(target.cache, [])
    with pytest.raises(ValueError, match=text):
        call("prepare_import", target.cache, 3, _mutate(metadata, path, value))
    assert snapshot(target.cache, []) == before
    call("prepare_import", target.cache, 3, json.dumps(metadata, indent=1))


def test_the_pages_kept_must_fit_the_window():
    """Consistent metadata of a sequence that this window cannot have left behind."""
    source = fed_in_chunks("sliding", (20, 20))
    metadata = json.loads(export(source.cache, 3)[0])
    # 40 positions with a window of 6: the next row sees 35. From 19 on are kept; what comes before
    # is for pops that reach further back.
    assert metadata["groups"][0]["first_position"] == 16
    for first, is_right in ((0, True), (12, True), (16, True), (32, True), (36, False)):
        changed = json.loads(json.dumps(metadata))
        for group in changed["groups"]:
            num_pages = 10 - first // 4
            group["nbytes"] = group["nbytes"] // group["num_logical_pages"] * num_pages
            group["shape"][1] = group["num_logical_pages"] = num_pages
            group["first_position"] = first
        target = Fed("sliding")
        if is_right:
            restore(target.cache, 3, (json.dumps(changed), empty_groups(json.dumps(changed))))
            target.cache.check_integrity()
            assert target.cache.first_position(3) == max(first, 16)
            continue
        with pytest.raises(ValueError, match="from position 32 or an earlier one on"):
            call("prepare_import", target.cache, 3, json.dumps(changed))
    changed["groups"][0] = metadata["groups"][0]
    with pytest.raises(ValueError, match="must have the same first_position"):
        call("prepare_import", Fed("sliding").cache, 3, json.dumps(changed))


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, '{"seq_id":' + "9" * 10**6 + "}"])
def test_deep_and_long_text(text):
    with pytest.raises(ValueError, match="checkpoint metadata"):
        call("prepare_import", Fed("mha").cache, 3, text)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_metadata(seed):
    """Cut or changed anywhere: refused, or the same in other words."""
    metadata = export(fed_in_chunks("mixed", (9, 5)).cache, 3)[0]
    rng = np.random.default_rng(seed)
    target = Fed("mixed")
    for _ in range(400):
        at = int(rng.integers(len(metadata)))
        if rng.random() < 0.3:
            text = metadata[:at]
        else:
            text = metadata[:at] + chr(rng.integers(1, 128)) + metadata[at + 1 :]
        try:
            call("prepare_import", target.cache, 3, text)
        except ValueError:
            assert target.cache.is_empty
            continue
        known = ("seq_id", "layer_begin", "layer_end", "rope_mode")
        left, right = (
            {k: v for k, v in json.loads(x).items() if k not in known} for x in (text, metadata)
        )
        assert left == right
        target.cache.remove_sequence(3)
    target.cache.check_integrity()


# --- layout -------------------------------------------------------------------------------------


def _hash(layers=None, **fields) -> str:
    kernels = [{**KERNELS, **MLA_KERNELS}] * 2
    cache = make_cache(kernels, layers=layers or [LAYER, MLA_LAYER], **fields)
    return call("get_layout_hash", cache)


def _with(index: int, **fields) -> list[dict]:
    layers = [dict(LAYER), dict(MLA_LAYER)]
    layers[index] |= fields
    return layers


def test_layout_hash_tells_apart_what_is_incompatible():
    factors = [tvm.runtime.tensor(np.full(4, x, "float32")) for x in (1, 2)]
    normal = {"rope_mode": 1}
    hashes = [
        _hash(),
        _hash(page_size=8),
        _hash(kv_dtype="bfloat16"),
        _hash([LAYER, LAYER]),
        _hash([MLA_LAYER, LAYER]),
        _hash([LAYER, MLA_LAYER, LAYER]),
        _hash(_with(0, num_kv_heads=1)),
        _hash(_with(0, qk_head_dim=16)),
        _hash(_with(0, kind="mha_sliding", window=5)),
        _hash(_with(0, kind="mha_sliding", window=6)),
        _hash(_with(1, qk_head_dim=32)),
        _hash(_with(1, v_head_dim=8)),
        _hash(rope_mode=1),
        _hash(rope_mode=2),
        _hash(_with(0, rope_theta=1e5), rope_mode=1),
        _hash(_with(0, rope_theta=1e4 + 1e-9), rope_mode=1),
        _hash(_with(0, rope_scale=2.0), rope_mode=1),
        _hash(_with(0, rope_details="llama3"), rope_mode=1),
        *(_hash(rope_ext_factors=x, **normal) for x in factors),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(re.fullmatch("[0-9a-f]{16}", x) for x in hashes)


def test_layout_hash_ignores_everything_else():
    assert {
        _hash(),
        _hash(max_total_tokens=128, max_num_sequences=3, prefill_chunk_size=7),
        _hash(aux_manager="plain"),
        _hash(dtype="float16", kv_dtype="float32"),
        _hash(_with(0, num_qo_heads=8)),
        _hash(_with(0, kernel_set=1)),
        _hash(_with(0, rope_theta=1e5, rope_details="x")),  # nothing is rotated
        _hash(_with(1, rope_theta=1e5)),
    } == {_hash()}


def test_another_layout_is_refused():
    metadata = export(fed_in_chunks("mha", (5,)).cache, 3)[0]
    with pytest.raises(ValueError, match=r"page_size=4 .*but the cache has page_size=8"):
        call("prepare_import", Fed("mha", page_size=8).cache, 3, metadata)
    with pytest.raises(ValueError, match="another layout"):
        call("prepare_import", Fed("mixed").cache, 3, metadata)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
