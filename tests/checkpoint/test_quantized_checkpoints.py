# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of quantized layers: bit for bit, refused by name, or converted on request."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS
from tvm_pagedkv.cache.conversion import types_of

from .. import reference
from ..reference import quantized as quantized_reference
from ..reference.checkpoint import page_group
from ..support.cases.caches.checkpoint_cases import call, export, restore
from ..support.cases.caches.quantized_cache_cases import (
    CODEC_NAMES,
    LAYER,
    MLA_LAYER,
    PAGE_SIZE,
    SLIDING_LAYER,
    QuantizedPair,
    quantized_layers,
)
from ..support.emulators.python_kernels import snapshot

LAYERS = [LAYER, SLIDING_LAYER, MLA_LAYER, LAYER]
TYPES = ("float32", "float16", *CODEC_NAMES)


def fed(kv_dtypes, **fields) -> QuantizedPair:
    """Sequences 3, 4 and 5, of which two share pages and the last one is empty."""
    pair = QuantizedPair(LAYERS, kv_dtypes, **fields)
    pair.add(3)
    pair.step([3], [21])
    pair.fork(3, 4)
    pair.step([3, 4], [1, 1])
    pair.step([4], [6])
    pair.add(5)
    return pair


def numbers(pages, group: np.ndarray) -> np.ndarray:
    """A page group ``[1, n, ...]`` with its rows as float32."""
    return pages.numbers(group[0])[None] if pages else group.astype(np.float32)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_page_groups(codec):
    kv_dtypes = [codec, codec, "int8", "float32"]
    source, target = fed(kv_dtypes), QuantizedPair(LAYERS, kv_dtypes, seed=1)
    metadata, groups = export(source.cache, 4)
    about, described = json.loads(metadata), source.cache.description["layers"]
    for index, pages in enumerate(quantized_layers(LAYERS, kv_dtypes)):
        group = about["groups"][index]
        first = source.cache.first_position(4, described[index]["group"]) // PAGE_SIZE
        wanted = page_group(source.rows(index, 4), first, PAGE_SIZE)
        reference.assert_close(numbers(pages, groups[index].numpy()), wanted, "float32", group)
        assert group.get("kv_dtype") == (f"{kv_dtypes[index]}.1" if pages else None)
        assert group["dtype"] == ("uint8" if pages else "float32")
        assert group["nbytes"] == described[index]["page_bytes"] * wanted.shape[1]
    restore(target.cache, 4, (metadata, groups))
    again = export(target.cache, 4)
    assert again[0] == metadata
    for ours, theirs in zip(again[1], groups, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    # What no row has written is zero, padding included.
    last = groups[0].numpy()[0, -1]
    pages = quantized_layers(LAYERS, kv_dtypes)[0]
    used = pages.num_rows * (pages.codec.row_bytes(32) + pages.codec.scale_bytes(32, 32))
    assert not last[used:].any()
    codes, scales = pages.parts(groups[0].numpy()[0])
    assert not codes[-1, :, :, 28 % PAGE_SIZE :].any() or 28 % PAGE_SIZE == 0
    assert np.isfinite(scales.astype(np.float32)).all()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_files(codec, tmp_path):
    kv_dtypes = [codec, "float32", codec, codec]
    source, target = fed(kv_dtypes), QuantizedPair(LAYERS, kv_dtypes, seed=1)
    source.cache.save(tmp_path / "a")
    assert target.cache.load(tmp_path / "a") == [3, 4, 5]
    target.cache.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    target.expected = source.expected
    target.check_rows()
    target.step([3, 4, 5], [1, 2, 3])


@pytest.mark.parametrize("theirs", TYPES)
@pytest.mark.parametrize("ours", TYPES)
def test_conversion(ours, theirs, tmp_path):
    types = [ours, ours, "float32" if ours == "int8" else "int8", ours]
    source, target = fed(theirs), QuantizedPair(LAYERS, types, seed=1)
    source.cache.save(tmp_path / "x")
    before = snapshot(target.cache, [])
    with pytest.raises(ValueError, match=r"in the file and .* load it with convert=True"):
        target.cache.load(tmp_path / "x")
    metadata = call("get_checkpoint_metadata", source.cache, 3)
    with pytest.raises(ValueError, match="they differ only in kv_dtype, .*convert=True"):
        call("prepare_import", target.cache, 3, metadata)
    assert snapshot(target.cache, []) == before
    assert target.cache.load(tmp_path / "x", {4: 9, 5: 5}, convert=True) == [9, 5]
    target.cache.check_integrity()
    for index, expected in enumerate(target.expected):
        expected.add_sequence(9), expected.add_sequence(5)
        rows = source.rows(index, 4)
        expected.sequences[9][0] = tuple(expected.kept(x.astype(np.float32)) for x in rows)
        expected.sequences[5][0] = None
        group = export(target.cache, 9)[1][index].numpy()
        first = target.cache.first_position(9, target.cache.description["layers"][index]["group"])
        wanted = page_group(
            tuple(x.astype(np.float32) for x in expected.sequences[9][0]), first // 4, 4
        )
        pages = quantized_layers(LAYERS, types)[index]
        # A value between two codes may be rounded to either of them.
        actual = numbers(pages, group)
        tolerance = 0.5 if pages and pages.codec.bits < 8 else 0.02
        np.testing.assert_allclose(actual, wanted, atol=tolerance)
        assert np.mean(np.abs(actual - wanted) > 1e-6) < 0.01
    # It goes on like any other sequence.
    with target.cache.forward([9], [1]):
        target.cache.attention(0, target.normal(1, 8, 32))
        target.cache.attention(1, target.normal(1, 8, 32))
        target.cache.append_mla_kv(2, target.normal(1, 64))
        target.cache.attention(3, target.normal(1, 8, 32))


def test_a_file_of_the_same_type_needs_no_conversion(tmp_path):
    source, target = fed("int8"), QuantizedPair(LAYERS, "int8", seed=1)
    source.cache.save(tmp_path / "x")
    target.cache.load(tmp_path / "x", convert=True)
    target.expected = source.expected
    target.check_rows()


def test_only_types_are_converted(tmp_path):
    source = QuantizedPair([LAYER], "int8")
    source.cache.save(tmp_path / "x")
    for layers, fields in (([LAYER] * 2, {}), ([LAYER], {"page_size": 8}), ([MLA_LAYER], {})):
        target = QuantizedPair(layers, "int8", **({"page_size": 4} | fields))
        with pytest.raises(ValueError, match="has another layout than the cache"):
            target.cache.load(tmp_path / "x", convert=True)


@pytest.mark.parametrize(
    "types",
    [
        *("int3", "", "1 x int8.1", "1 x int8.1, 2 x float32", "99999999999 x int8.1, 1 x int4.1"),
        *("int8", "int8.2"),
    ],
)
def test_layouts_of_unknown_types(types, tmp_path):
    """A file may claim anything, under a checksum that is right."""
    source, target = fed("int8"), QuantizedPair(LAYERS, "float32")
    source.cache.save(tmp_path / "x")
    layout = source.cache.description["layout"]
    text = (tmp_path / "x").read_bytes()
    changed = layout.replace("dtype=int8.1", f"dtype={types}")
    assert changed != layout
    rewritten = _with_layout(text, layout, changed)
    (tmp_path / "x").write_bytes(rewritten)
    with pytest.raises(
        ValueError, match="another layout|known: float32|layout cannot be read|knows revision 1"
    ):
        target.cache.load(tmp_path / "x", convert=True)
    assert target.cache.is_empty


def _with_layout(data: bytes, layout: str, changed: str) -> bytes:
    """A file with another layout in its header, whose checksum is right."""
    from tvm_pagedkv.cache.checkpoint import _NO_DIGEST, _digest, _encode

    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    about = header["__metadata__"]
    about["layout"], about["header_checksum"] = changed, _NO_DIGEST
    about["metadata"] = about["metadata"].replace(layout, changed)
    about["header_checksum"] = _digest(_encode(header)).hexdigest()
    return _encode(header) + data[8 + size :]


def test_types_of_a_layout():
    uniform, rest = "page_size=4 dtype=int8.1; 2 x mha", "page_size=4; 2 x mha"
    assert types_of(uniform, 2) == (["int8.1"] * 2, rest)
    mixed = "page_size=4 dtype=2 x int8.1, 1 x float16; 3 x mha"
    assert types_of(mixed, 3) == (["int8.1", "int8.1", "float16"], "page_size=4; 3 x mha")
    for text in ("", "page_size=4", mixed.replace("2 x int8.1", "x"), mixed.replace("1 x", "2 x")):
        with pytest.raises(ValueError, match="its layout cannot be read"):
            types_of(text, 3)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("is_mla", [False, True])
def test_numbers_of_pages(codec, is_mla):
    """The dequantization of files is the specification's, for rows of any kind."""
    pair = QuantizedPair([MLA_LAYER if is_mla else LAYER], codec)
    from tvm_pagedkv.cache.page_format import PageFormat

    pages = PageFormat.of(pair.cache, 0)
    layer = quantized_layers(pair.layers, [codec])[0]
    assert (pages.num_bytes, pages.dtype) == (layer.page_bytes, "uint8")
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, *layer.row_shape, layer.width)).astype(np.float32)
    rows[0, ..., 0, :], rows[1, ..., 1, 5] = 0, np.nan
    memory = np.zeros((3, layer.page_bytes), np.uint8)
    layer.write(memory, (slice(None),), rows)
    kept = quantized_reference.keep(CODECS[codec], rows, layer.v_width)
    np.testing.assert_allclose(pages.numbers(memory), kept, rtol=1e-6, atol=1e-6)


def test_history_that_does_not_fit_is_left_out_of_a_conversion(tmp_path):
    """Rows of the pages that are left out are not written anywhere."""
    fields = dict(
        num_layers=2, num_qo_heads=2, num_kv_heads=1, qk_head_dim=32, dtype="float32", page_size=4,
        max_total_tokens=512, layers=[pkv.LayerSpec("mha_sliding", window=6), pkv.LayerSpec()],
    )  # fmt: skip
    source = pkv.create(pkv.KVCacheConfig(**fields, kv_dtype="int8"))
    source.add_sequence(0)
    rng = np.random.default_rng(0)
    for _ in range(6):
        with source.forward([0], [20]):
            for layer in range(2):
                source.attention(layer, rng.standard_normal((20, 4, 32), dtype="float32"))
    source.save(tmp_path / "x")
    small = {"max_num_sequences": 1, "prefill_chunk_size": 4}
    target = pkv.create(pkv.KVCacheConfig(**fields, **small))
    assert target.load(tmp_path / "x", convert=True) == [0]
    target.check_integrity()
    first = target.first_position(0)
    assert first == source.first_position(0) > 90
    with pytest.raises(ValueError, match="have been reclaimed"):
        target.pop_n(0, 100)
    for ours, theirs in zip(
        source.debug_get_kv(0, first), target.debug_get_kv(0, first), strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
