# SPDX-License-Identifier: Apache-2.0
"""The cache inside apache-tvm as the oracle: slots to receive, and which rows go where.

It copies by NVSHMEM, which is not there; functions under these names record what it would copy.
"""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.transfer import _runtime
from tvm_pagedkv.transfer.layout import expand_runs

from ..support.cases.caches.transfer_cases import append, rows
from ..support.emulators.python_kernels import make_cache, view
from ..support.emulators.stock import create_positional

NAMES = (
    "transpose_append prefill_ragged prefill decode merge split_rotary copy_single_page "
    "debug_get_kv compact_copy"
).split()


@pytest.fixture(scope="module")
def stock():
    """A stock cache that may transfer, and the (positions' remote slots, receiver) it sent."""
    sent = []

    def record(*arguments):
        integers = [view(x).tolist() for x in arguments if getattr(x, "ndim", 0) == 1]
        sent.append(integers)

    def empty(shape, dtype, device):
        extra = (shape[0] + 2, *shape[1:])  # it looks beyond the end when it makes its views
        return tvm.runtime.empty(extra, str(dtype), device)

    for name, function in (
        ("runtime.disco.nvshmem.init_nvshmem", lambda *_: None),
        ("runtime.disco.nvshmem.empty", empty),
        ("nvshmem.KVTransfer", record),
        ("nvshmem.KVTransferPageToPage", record),
    ):
        tvm_ffi.register_global_func(name, function, override=True)
    config = pkv.KVCacheConfig(
        num_layers=1,
        num_qo_heads=4,
        num_kv_heads=2,
        qk_head_dim=8,
        dtype="float32",
        page_size=4,
        max_num_sequences=8,
        max_total_tokens=64,
        prefill_chunk_size=32,
        rope=pkv.RopeConfig(mode="none"),
        enable_kv_transfer=True,
    )
    kernels = {name: tvm_ffi.convert(lambda *_: None) for name in NAMES}
    pkv.use_stock_runtime()
    try:
        return create_positional(config, kernels, "tirx"), sent
    finally:
        pkv.use_pagedkv_runtime()


def call(name: str, *arguments):
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")(*arguments)


def test_prepare_recv(stock):
    """The same calls give the same slots: both hand out pages in ascending order."""
    numbers = []
    for cache in (stock[0], make_cache()):
        call("kv_state_clear", cache)
        for seq_id in (0, 1):
            call("kv_state_add_sequence", cache, seq_id)
        numbers.append(
            [
                list(call("kv_cache_disagg_prepare_recv", cache, seq_id, length))
                for seq_id, length in ((0, 6), (1, 6), (0, 7), (1, 20), (0, 1))
            ]
        )
        assert call("attention_kv_cache_get_sequence_length", cache, 0) == 14
        call("kv_state_popn", cache, 0, 1)
        assert call("attention_kv_cache_get_sequence_length", cache, 0) == 13
    assert numbers[0] == numbers[1]
    assert numbers[0][2] == [2, 6, 2, 16, 5]


def test_mark_send(stock):
    """Rows of a step, and rows that were there before it, go to the same slots of the receiver."""
    slots, peer = Shape([2, 8, 4, 40, 3]), 3
    cache, sent = stock
    sent.clear()
    call("kv_state_clear", cache)
    call("kv_state_add_sequence", cache, 2)
    qkv = tvm.runtime.tensor(rows(0, 3))

    def step():
        call("kv_state_begin_forward", cache, Shape([2]), Shape([3]))
        out = tvm.runtime.empty((3, 4, 8), "float32")
        call("attention_kv_cache_attention_with_fused_qkv", cache, 0, 1.0, qkv, out)
        call("kv_state_end_forward", cache)

    step()
    call("kv_cache_disagg_mark_send", cache, 2, 1, slots, peer)
    step()
    # Its order: rows that were there, their slots there and receivers; then those of the step.
    (remote, local, receivers), (new_remote, new_receivers) = sent
    assert receivers == [peer] * 2 and new_receivers == [peer] * 3

    ours = make_cache()
    blocks = []
    _runtime.set_send_handler(ours, peer, blocks.append, [64])
    ours.add_sequence(2)
    append(ours, 2, rows(0, 3))
    call("kv_cache_disagg_mark_send", ours, 2, 1, slots, peer)
    append(ours, 2, rows(0, 3))
    runs = [_runtime.send_block(ours, block)["runs"][0] for block in blocks]
    there = [expand_runs(each[:, 1], each[:, 2]).tolist() for each in runs]
    here = [expand_runs(each[:, 0], each[:, 2]).tolist() for each in runs]
    assert there == [remote, new_remote] == [[8, 9], [10, 11, 40]]
    assert here[0] == local == [1, 2]
    table = ours.page_table(2)  # its first page is a copy: the block that is not read has the other
    assert here[1] == [table[position // 4] * 4 + position % 4 for position in (3, 4, 5)]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
