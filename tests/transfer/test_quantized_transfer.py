# SPDX-License-Identifier: Apache-2.0
"""Quantized rows go to another cache as they are: codes and scales; other codecs are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv.transfer import Receiver, Sender, _runtime, local_channels

from ..support.cases.caches.checkpoint_cases import export
from ..support.cases.caches.quantized_cache_cases import (
    CODEC_NAMES,
    LAYER,
    MLA_LAYER,
    SLIDING_LAYER,
    QuantizedPair,
    make_quantized,
)
from ..support.cases.caches.transfer_cases import connect, pump

LAYERS = [LAYER, SLIDING_LAYER, MLA_LAYER]


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("chunk", [3, 8, 21])
def test_rows_arrive_as_codes(codec, chunk):
    kv_dtypes = [codec, codec, "int8"]
    source, target = (QuantizedPair(LAYERS, kv_dtypes, seed=seed) for seed in range(2))
    source.add(7)
    target.cache.add_sequence(5)
    sender, receiver = connect(source.cache, target.cache)
    ticket = receiver.request(5, 21)
    send = sender.send(sender.next_request(), 7)
    for begin in range(0, 21, chunk):
        source.step([7], [min(chunk, 21 - begin)])
        pump(sender, receiver)
    sender.finish(send, {"token": 3})
    assert receiver.wait(ticket) == {"token": 3}
    sender.wait(send)
    # Pages of the receiver may begin elsewhere in the window: compare what both keep.
    for ours, theirs in zip(export(target.cache, 5)[1], export(source.cache, 7)[1], strict=True):
        common = min(ours.shape[1], theirs.shape[1])
        assert common > 0
        np.testing.assert_array_equal(ours.numpy()[:, -common:], theirs.numpy()[:, -common:])
    for each in source.expected:
        each.sequences[5], each.trees[5] = list(each.sequences[7]), []
    target.expected = source.expected
    target.step([5], [3])
    target.step([5], [1])


@pytest.mark.parametrize(("ours", "theirs"), [("int8", "float32"), ("int4", "int8")])
def test_other_codecs_are_refused_by_name(ours, theirs):
    one, other = local_channels()
    sender = Sender(make_quantized([LAYER], ours), one)
    with pytest.raises(ValueError, match=f"kv_dtype is '{theirs}' here and '{ours}' there"):
        Receiver(make_quantized([LAYER], theirs), other)
    with pytest.raises(ValueError, match=f"kv_dtype is '{ours}' here and '{theirs}' there"):
        sender.connect()


def test_one_layer_of_another_codec_is_refused():
    one, other = local_channels()
    Sender(make_quantized([LAYER, LAYER], ["int8", "int4"]), one)
    with pytest.raises(ValueError, match=r"kv_dtype is 'int8' here and \['int8', 'int4'\] there"):
        Receiver(make_quantized([LAYER, LAYER], "int8"), other)


def test_shared_memory_holds_the_bytes_of_all_pools():
    """Pools of codecs lie one after the other, each within its room."""
    cache = make_quantized(LAYERS, ["int8", "int4", "int8"], enable_kv_transfer=True)
    descriptor, num_bytes = _runtime.shared_pages(cache)
    ranges = _runtime.pool_ranges(cache)
    assert descriptor >= 0
    described, groups = cache.description["layers"], cache.stats()["groups"]
    wanted = [x["page_bytes"] * groups[x["group"]]["num_pages"] for x in described]
    assert [size for _, size in ranges] == wanted
    ends = [begin + size for begin, size in sorted(ranges)]
    begins = [begin for begin, _ in sorted(ranges)][1:]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=False))
    assert max(ends) <= num_bytes


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
