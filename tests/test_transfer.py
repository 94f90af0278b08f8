# SPDX-License-Identifier: Apache-2.0
"""Sequences that go from one cache to another: what arrives is what the reference says."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv.transfer import Receiver, Sender, local_channels

from . import reference
from .python_kernels import make_cache, poison, shuffle

HEADS, KV_HEADS, DIM = 4, 2, 8


def connect(source, target, **options):
    """A sender and a receiver of this process."""
    one, other = local_channels()
    sender, receiver = Sender(source, one, **options), Receiver(target, other, **options)
    sender.connect()
    return sender, receiver


def caches(seed: int, **fields):
    """Two caches whose free pages lie in different orders and hold NaN."""
    pair = make_cache(**fields), make_cache(**fields)
    for index, cache in enumerate(pair):
        shuffle(cache, 2 * seed + index)
        poison(cache)
    return pair


def append(cache, seq_id, qkv):
    """One step with the same rows in all layers; the output of the last one."""
    with cache.forward([seq_id], [len(qkv)]):
        for layer in range(len(cache.description["layers"])):
            out = cache.attention(layer, qkv)
    return out.numpy()


def attend(qkv, num_new):
    """What the reference says of the last rows of a sequence."""
    q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
    kv_indptr, q_indptr = np.array([0, len(qkv)]), np.array([0, num_new])
    return reference.ragged_attention(q[-num_new:], q_indptr, k, v, kv_indptr, DIM**-0.5)[0]


@pytest.mark.parametrize("chunk", [3, 8, 21], ids="chunk{}".format)
@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
def test_rows_arrive_as_they_are_computed(seed, chunk):
    source, target = caches(seed)
    sender, receiver = connect(source, target)
    qkv = np.random.default_rng(seed).standard_normal((26, 8, DIM)).astype("float32")
    target.add_sequence(5)
    ticket = receiver.request(5, 21, {"tokens": [1, 2]})
    assert target.sequence_length(5) == 21
    request = sender.next_request()
    assert (request.begin, request.length, request.payload) == (0, 21, {"tokens": [1, 2]})
    source.add_sequence(7)
    send = sender.send(request, 7)
    for begin in range(0, 21, chunk):
        append(source, 7, qkv[begin : min(begin + chunk, 21)])
        receiver.poll()
        sender.poll()
        source.check_integrity()
        target.check_integrity()
    source.remove_sequence(7)
    sender.finish(send, {"token": 3})
    assert receiver.wait(ticket) == {"token": 3}
    sender.wait(send)
    assert source.stats()["num_pinned_pages"] == 0 and source.stats()["num_used_pages"] == 0
    k, v = (x.numpy() for x in target.debug_get_kv(5))
    for layer in range(2):
        np.testing.assert_array_equal(k[layer], qkv[:21, HEADS : HEADS + KV_HEADS])
        np.testing.assert_array_equal(v[layer], qkv[:21, HEADS + KV_HEADS :])
    poison(target)
    np.testing.assert_allclose(append(target, 5, qkv[21:]), attend(qkv, 5), rtol=1e-5, atol=1e-5)
    target.check_integrity()
