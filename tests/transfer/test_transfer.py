# SPDX-License-Identifier: Apache-2.0
"""Sequences that go from one cache to another: what arrives is what the reference says."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import Shape

from .. import reference
from ..support.cases.caches.transfer_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    append,
    attend,
    caches,
    connect,
    pump,
    rows,
)
from ..support.emulators.python_kernels import (
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    poison,
    share_every_prefix,
)
from ..support.worlds.permissive_steps import permissive_step


def transfer(source, target, ids, length, steps, sender=None, receiver=None):
    """Request, then compute and send in steps; `steps` yields after each one."""
    if sender is None:
        sender, receiver = connect(source, target)
    ticket = receiver.request(ids[1], length)
    send = sender.send(sender.next_request(), ids[0])
    for _ in steps:
        pump(sender, receiver)
        source.check_integrity()
        target.check_integrity()
    sender.finish(send, {"token": 3})
    assert receiver.wait(ticket) == {"token": 3}
    sender.wait(send)
    assert source.stats()["num_pinned_pages"] == 0
    return sender, receiver


def check_rows(target, seq_id, qkv):
    k, v = (x.numpy() for x in target.debug_get_kv(seq_id))
    for layer in range(len(k)):
        np.testing.assert_array_equal(k[layer], qkv[:, HEADS : HEADS + KV_HEADS])
        np.testing.assert_array_equal(v[layer], qkv[:, HEADS + KV_HEADS :])


@pytest.mark.parametrize("chunk", [3, 8, 21], ids="chunk{}".format)
@pytest.mark.parametrize("page_size", [1, 4, 16], ids="page{}".format)
@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
def test_rows_arrive_as_they_are_computed(seed, page_size, chunk):
    source, target = caches(seed, page_size=page_size)
    qkv = rows(seed, 26)
    source.add_sequence(7)
    target.add_sequence(5)

    def steps():
        for begin in range(0, 21, chunk):
            append(source, 7, qkv[begin : min(begin + chunk, 21)])
            if begin + chunk >= 21:
                source.remove_sequence(7)  # what is not read yet stays until it is
            yield

    transfer(source, target, (7, 5), 21, steps())
    assert source.stats()["num_used_pages"] == 0
    check_rows(target, 5, qkv[:21])
    poison(target)
    for out in append(target, 5, qkv[21:]):
        reference.assert_close(out, attend(qkv, 5), "float32")


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
def test_windows_get_no_more_than_they_see(seed):
    """Layers with windows beside plain ones; onto a sequence that holds a part already."""
    windows = (0, 6, 30)
    layers = [LAYER | ({"kind": "mha_sliding", "window": w} if w else {}) for w in windows]
    sizes = {"layers": layers, "max_total_tokens": 256, "prefill_chunk_size": 80}
    source, target = caches(seed, **sizes)
    qkv = rows(seed, 84)
    sender = receiver = None
    for cache, seq_id in ((source, 1), (target, 2)):
        cache.add_sequence(seq_id)
        append(cache, seq_id, qkv[:5])
    for begin, end, chunk in ((5, 13, 4), (13, 80, 29)):

        def steps(begin=begin, end=end, chunk=chunk):
            for at in range(begin, end, chunk):
                append(source, 1, qkv[at : min(at + chunk, end)])
                yield

        sender, receiver = transfer(source, target, (1, 2), end - begin, steps(), sender, receiver)
        poison(target)
    used = [group["num_used_pages"] for group in target.stats()["groups"]]
    assert used[0] == 20 and used[1] <= 7 and used[2] <= 13
    for out, window in zip(append(target, 2, qkv[80:]), windows, strict=True):
        expected = attend(qkv, 4, window or None)
        reference.assert_close(out, expected, "float32")


def test_an_all_sliding_model_after_the_prompt_is_computed():
    layers = [LAYER | {"kind": "mha_sliding", "window": 6}]
    source, target = caches(0, layers=layers, max_total_tokens=256, prefill_chunk_size=80)
    qkv = rows(0, 82)
    source.add_sequence(0)
    target.add_sequence(0)
    append(source, 0, qkv[:80])
    transfer(source, target, (0, 0), 80, [None])
    poison(target)
    reference.assert_close(append(target, 0, qkv[80:])[0], attend(qkv, 2, 6), "float32")


@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
def test_latent_rows(seed):
    source, target = caches(seed, [MLA_KERNELS], layers=[MLA_LAYER] * 2)
    latent = np.random.default_rng(seed).standard_normal((2, 18, 24)).astype("float32")
    source.add_sequence(0)
    target.add_sequence(3)

    def steps():
        for begin, end in ((0, 7), (7, 18)):
            with source.forward([0], [end - begin]):
                for layer in range(2):
                    source.append_mla_kv(layer, latent[layer, begin:end])
            yield

    transfer(source, target, (0, 3), 18, steps())
    np.testing.assert_array_equal(target.debug_get_kv_mla(3).numpy(), latent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types(dtype):
    source, target = caches(0, dtype=dtype)
    k, v = np.random.default_rng(0).standard_normal((2, 2, 18, KV_HEADS, DIM)).astype(dtype)
    source.add_sequence(0)
    target.add_sequence(0)
    with permissive_step(source, [0], [18]):
        pass
    source.debug_set_kv(0, 0, k, v)
    transfer(source, target, (0, 0), 18, [None])
    for actual, expected in zip(target.debug_get_kv(0), (k, v), strict=True):
        assert actual.numpy().tobytes() == expected.tobytes()


def test_several_sequences_and_forks():
    """Transfers in one step and out of order, onto a fork that shares its last page."""
    source, target = caches(1)
    sender, receiver = connect(source, target)
    qkv = rows(1, 30)
    for seq_id in (0, 1):
        source.add_sequence(seq_id)
        append(source, seq_id, qkv[:6])
    target.add_sequence(10)
    append(target, 10, qkv[:6])
    target.fork_sequence(10, 11)
    tickets = [receiver.request(11, 9), receiver.request(10, 4)]
    requests = [sender.next_request(), sender.next_request()]
    sends = [sender.send(requests[1], 1), sender.send(requests[0], 0)]
    with source.forward([0, 1], [9, 5]):  # 1 has a row more than anybody wants
        for layer in range(2):
            source.attention(layer, np.concatenate([qkv[6:15], qkv[20:25]]))
    for send in sends:
        sender.finish(send)
    pump(sender, receiver)
    assert all(ticket.is_done for ticket in tickets)
    check_rows(target, 11, qkv[:15])
    check_rows(target, 10, np.concatenate([qkv[:6], qkv[20:24]]))
    target.check_integrity()
    source.check_integrity()
    for cache in (source, target):
        cache.clear()
        assert cache.stats()["num_used_pages"] == 0


@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
def test_received_rows_as_a_shared_prefix(seed):
    """Pages that were received are read once for a sequence and its forks, as any others are."""
    source, target = caches(seed)
    share_every_prefix(target)
    qkv = rows(seed, 24)
    for cache in (source, target):
        cache.add_sequence(0)
        append(cache, 0, qkv[:6])
    target.fork_sequence(0, 2)  # shares the page that the received rows begin in
    append(source, 0, qkv[6:19])
    transfer(source, target, (0, 0), 13, [None])
    target.fork_sequence(0, 1)
    poison(target)
    with target.forward([0, 1, 2], [2, 3, 1]):
        new = np.concatenate([qkv[19:21], qkv[21:24], qkv[6:7]])
        out = target.attention(0, new).numpy()
        target.attention(1, new)
    stats = target.stats()
    assert stats["step_pages_read"] < stats["step_pages_read_without_sharing"]
    expected = [attend(qkv[:21], 2), attend(np.concatenate([qkv[:19], qkv[21:]]), 3)]
    expected.append(attend(qkv[:7], 1))
    reference.assert_close(out, np.concatenate(expected), "float32")
    target.check_integrity()


def test_a_sequence_that_goes_on_leaves_sent_rows_alone():
    """The sender pops and appends before the receiver has read: it gets what was sent."""
    source, target = caches(2)
    sender, receiver = connect(source, target)
    qkv = rows(2, 30)
    source.add_sequence(0)
    target.add_sequence(0)
    ticket = receiver.request(0, 10)
    send = sender.send(sender.next_request(), 0)
    append(source, 0, qkv[:10])
    sender.finish(send)
    source.pop_n(0, 3)
    append(source, 0, qkv[20:30])
    receiver.poll()
    sender.poll()
    receiver.wait(ticket)
    check_rows(target, 0, qkv[:10])
    source.check_integrity()


def test_the_stock_functions_without_a_receiver_object():
    """prepare_recv alone, as engines call it: the next step takes the rows as received."""
    _, target = caches(0)
    prepare = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")
    target.add_sequence(0)
    before = target.stats()
    numbers = list(prepare(target, 0, 10))
    assert sum(numbers[2::2]) == 10 and target.sequence_length(0) == 10
    target.pop_n(0, 10)  # gives up
    assert target.stats() == before
    prepare(target, 0, 10)
    qkv = rows(0, 12)
    k, v = qkv[:10, HEADS : HEADS + KV_HEADS], qkv[:10, HEADS + KV_HEADS :]
    target.debug_set_kv(0, 0, np.stack([k] * 2), np.stack([v] * 2))
    out = append(target, 0, qkv[10:])[1]
    reference.assert_close(out, attend(qkv, 2), "float32")
    target.check_integrity()


def test_mark_send_of_the_stock_interface():
    """The function itself, with the numbers of another cache's prepare_recv."""
    source, target = caches(3)
    sender, receiver = connect(source, target)
    qkv = rows(3, 12)
    source.add_sequence(0)
    target.add_sequence(0)
    ticket = receiver.request(0, 12)
    request = sender.next_request()
    send = sender.send(request, 0)
    mark = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_mark_send")
    with pytest.raises(ValueError, match="is being sent already"):
        mark(source, 0, 0, Shape(request.slots), 0)
    append(source, 0, qkv)
    sender.finish(send)
    pump(sender, receiver)
    assert ticket.is_done
    check_rows(target, 0, qkv)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
