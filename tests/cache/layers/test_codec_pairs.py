# SPDX-License-Identifier: Apache-2.0
"""Caches whose layers have a codec for K and another one for V."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from ...support.cases.caches.checkpoint_cases import export, restore
from ...support.cases.caches.quantized_cache_cases import (
    LAYER,
    PAIR_NAMES,
    SLIDING_LAYER,
    QuantizedPair,
)
from ...support.cases.caches.transfer_cases import connect, pump

LAYERS = [LAYER, SLIDING_LAYER, LAYER]
parametrize_pairs = pytest.mark.parametrize("codec", PAIR_NAMES)


def fed(codec: str, seed: int = 0) -> QuantizedPair:
    """Sequences 3 and 4, which share pages; in the last layer K and V have one codec."""
    pair = QuantizedPair(LAYERS, [codec, codec, "int8"], seed=seed)
    pair.add(3)
    pair.step([3], [21])
    pair.fork(3, 4, 18)
    pair.step([3, 4], [1, 2])
    return pair


@parametrize_pairs
def test_steps_forks_pops_and_trees(codec):
    pair = fed(codec)
    pair.pop(4, 3)
    pair.step([4, 3], [6, 1])
    pair.step([3, 4], [3, 1], [-1, 0, 0, -1])
    pair.commit([3, 4], [2, 0])
    pair.step([3, 4], [1, 1])
    pair.check_rows()


@parametrize_pairs
def test_rows_are_written_and_read(codec):
    pair = fed(codec)
    rows = pair.normal(2, 3, 3, 2, 32)
    pair.cache.debug_set_kv(3, 18, *rows)
    for index in range(3):
        for plane, kept in enumerate(pair.rows(index, 3)):
            kept[18:21] = pair.expected[index].kept(rows[plane, index], is_v=plane == 1)
    pair.check_rows()


@parametrize_pairs
def test_checkpoints_are_the_same_bit_for_bit(codec, tmp_path):
    source, target = fed(codec), QuantizedPair(LAYERS, [codec, codec, "int8"], seed=1)
    metadata, groups = export(source.cache, 4)
    restore(target.cache, 4, (metadata, groups))
    again = export(target.cache, 4)
    assert again[0] == metadata
    for ours, theirs in zip(again[1], groups, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    target.cache.remove_sequence(4)
    source.cache.save(tmp_path / "a")
    assert target.cache.load(tmp_path / "a") == [3, 4]
    target.expected = source.expected
    target.check_rows()
    target.step([3, 4], [1, 2])


@parametrize_pairs
@pytest.mark.parametrize("other", ["int8", "float32", "int4,int8"])
def test_files_are_converted(codec, other, tmp_path):
    source = fed(codec)
    source.cache.save(tmp_path / "x")
    target = QuantizedPair(LAYERS, other)
    with pytest.raises(ValueError, match=f"{codec}.* in the file and {other}.* in the cache"):
        target.cache.load(tmp_path / "x")
    assert target.cache.load(tmp_path / "x", convert=True) == [3, 4]
    begin = max(
        target.cache.first_position(3, g) for g in range(len(target.cache.stats()["groups"]))
    )
    read = zip(
        target.cache.debug_get_kv(3, begin), source.cache.debug_get_kv(3, begin), strict=True
    )
    for plane, (ours, theirs) in enumerate(read):
        for layer in range(3):
            kept = target.expected[layer].kept(theirs.numpy()[layer], is_v=plane == 1)
            np.testing.assert_allclose(ours.numpy()[layer], kept, rtol=1e-5, atol=1e-5)


@parametrize_pairs
def test_rows_arrive_as_codes(codec):
    kv_dtypes = [codec, codec, "int8"]
    source, target = (QuantizedPair(LAYERS, kv_dtypes, seed=seed) for seed in range(2))
    source.add(7)
    target.cache.add_sequence(5)
    sender, receiver = connect(source.cache, target.cache)
    ticket = receiver.request(5, 21)
    send = sender.send(sender.next_request(), 7)
    for begin in range(0, 21, 8):
        source.step([7], [min(8, 21 - begin)])
        pump(sender, receiver)
    sender.finish(send, {})
    assert receiver.wait(ticket) == {}
    sender.wait(send)
    for each in source.expected:
        each.sequences[5], each.trees[5] = list(each.sequences[7]), []
    target.expected = source.expected
    target.step([5], [3])


FIELDS = {"num_layers": 1, "num_qo_heads": 2, "num_kv_heads": 2, "qk_head_dim": 64}


def test_a_pair_may_be_said_in_three_ways():
    said = ["int8,int4", ("int8", "int4"), ["int8", "int4"]]
    configs = {pkv.KVCacheConfig(**FIELDS, kv_dtype=kv_dtype) for kv_dtype in said}
    assert [config.resolved().kv_dtype for config in configs] == ["int8,int4"]
    assert pkv.KVCacheConfig(**FIELDS, kv_dtype=("int8", "int8")).kv_dtype == "int8"
    layer = pkv.LayerSpec(kv_dtype=("int4", "int8"))
    resolved = pkv.KVCacheConfig(**FIELDS, layers=[layer]).resolved()
    assert resolved.kv_dtype == resolved.layers[0].kv_dtype == "int4,int8"
    # Codes of 64 and 32 bytes, scales of 4 and 4, of 2 heads and 16 slots.
    assert resolved.layers[0].page_bytes(16) == 2 * 16 * (64 + 32 + 4 + 4)


@pytest.mark.parametrize(
    ("kv_dtype", "error", "message"),
    [
        (("int8", "float16"), ValueError, "types that are not quantized only both"),
        (("int8", "int3"), ValueError, "not a pair of codecs; K and V can each have one of int8"),
        (("int8", "int4", "int4"), TypeError, "a name, or a pair of the codecs of K and V"),
        (("int8", 4), TypeError, "a name, or a pair of the codecs of K and V"),
        (8, TypeError, "kv_dtype must be a name, or a pair"),
    ],
)
def test_what_is_no_pair(kv_dtype, error, message):
    with pytest.raises(error, match=message):
        pkv.KVCacheConfig(**FIELDS, kv_dtype=kv_dtype)


def test_latent_rows_have_one_codec():
    layer = pkv.LayerSpec(kind="mla", qk_head_dim=64, v_head_dim=32)
    with pytest.raises(ValueError, match="layer 0: .* the latent rows of MLA are both; choose one"):
        pkv.KVCacheConfig(**FIELDS, layers=[layer], kv_dtype="int8,int4")


def test_scales_are_aligned():
    fields = FIELDS | {"num_kv_heads": 1, "qk_head_dim": 32, "page_size": 1}
    with pytest.raises(ValueError, match="would not begin at a multiple of 4 .* page_size of 2 or"):
        pkv.KVCacheConfig(**fields, kv_dtype="int4,int8").memory_bytes()
    pkv.KVCacheConfig(**fields, kv_dtype="int8,int4").memory_bytes()


def test_rows_that_the_cache_rotates_when_it_reads_them_are_refused():
    with pytest.raises(ValueError, match="kv_dtype 'int8,int4' .* rope mode \"inline\" rotates K"):
        pkv.KVCacheConfig(**FIELDS, kv_dtype="int8,int4", rope=pkv.RopeConfig(mode="inline"))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
