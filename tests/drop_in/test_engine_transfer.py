# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill with the functions that mlc-llm's engine calls."""

from __future__ import annotations

import pytest
import tvm

from tvm_pagedkv.transfer import _runtime

from ..support.cases.caches.engine_calls import DIM, NUM_LAYERS, call, make_engine
from ..support.emulators.python_kernels import view


def _connect(sender, receiver, number: int) -> None:
    """Let rows that the sender's cache makes ready go to the receiver's pages, as by RDMA."""
    layers = range(NUM_LAYERS)
    sources = [view(_runtime.pages_of(sender.cache, layer)) for layer in layers]
    targets = [view(_runtime.pages_of(receiver.cache, layer)) for layer in layers]

    def put(block: int) -> None:
        for source, target, length in _runtime.send_block(sender.cache, block)["runs"][0]:
            for i in range(length):
                here, there = divmod(source + i, 4), divmod(target + i, 4)
                for layer in layers:
                    rows = sources[layer][here[0], :, :, here[1]]
                    targets[layer][there[0], :, :, there[1]] = rows
        _runtime.release_send_block(sender.cache, block)

    _runtime.set_send_handler(sender.cache, number, put, [65 * 4])


@pytest.mark.parametrize("group_offset", [0, 3])
def test_prefill_here_and_decode_there(group_offset):
    """The last argument of mark_send is the number of the destination group's first worker."""
    prefill, decode = make_engine("ours"), make_engine("ours")
    _connect(prefill, decode, group_offset)
    decode.add(0, 1)
    decode.step([0], [6])
    slots = call("vm.builtin.kv_cache_disagg_prepare_recv", decode.cache, 1, 23)
    prefill.add(5)
    mark = "vm.builtin.kv_cache_disagg_mark_send"
    with pytest.raises(ValueError, match=rf"no receiver 7 .*connected: {group_offset}\)"):
        call(mark, prefill.cache, 5, 0, slots, 7)
    call(mark, prefill.cache, 5, 0, slots, group_offset)
    prefill.step([5], [16])
    prefill.step([5], [7])
    decode.expected.sequences[1] = prefill.expected.sequences[5]
    prefill.remove(5)
    decode.check()
    decode.step([1, 0], [1, 1])
    decode.step([0, 1], [4, 9])


def test_only_what_the_receiver_lacks_is_sent():
    """It has the first 8 positions, of a prefix; the sender's rows from there on, old and new."""
    prefill, decode = make_engine("ours"), make_engine("ours")
    _connect(prefill, decode, 1)
    text = [prefill.rng.standard_normal((20, 8, DIM)).astype("float32") for _ in range(NUM_LAYERS)]
    for engine, length in ((prefill, 13), (decode, 8)):
        engine.add(0)
        engine.step([0], [length], rows=[each[:length] for each in text])
    slots = call("vm.builtin.kv_cache_disagg_prepare_recv", decode.cache, 0, 12)
    call("vm.builtin.kv_cache_disagg_mark_send", prefill.cache, 0, 8, slots, 1)
    prefill.step([0], [7], rows=[each[13:] for each in text])
    decode.expected.sequences[0] = prefill.expected.sequences[0]
    decode.step([0], [1])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
