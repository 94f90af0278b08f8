# SPDX-License-Identifier: Apache-2.0
"""Pairs of caches with a sender and a receiver, and what the reference says of their rows."""

from __future__ import annotations

import numpy as np
import tvm_ffi

from tvm_pagedkv.transfer import Receiver, Sender, local_channels
from tvm_pagedkv.transfer.sockets import SocketChannel

from .... import reference
from ...emulators.python_kernels import make_cache, poison, shuffle, snapshot

HEADS, KV_HEADS, DIM = 4, 2, 8


def connect(source, target, **options):
    """A sender and a receiver of this process."""
    one, other = local_channels()
    sender, receiver = Sender(source, one, **options), Receiver(target, other, **options)
    sender.connect()
    return sender, receiver


def caches(seed: int, *kernels, **fields):
    """Two caches whose free pages lie in different orders and hold NaN."""
    pair = make_cache(*kernels, **fields), make_cache(*kernels, **fields)
    for index, cache in enumerate(pair):
        shuffle(cache, 2 * seed + index)
        poison(cache)
    return pair


def rows(seed: int, count: int) -> np.ndarray:
    """Q, K and V of some positions: float32 ``[count, HEADS + 2 * KV_HEADS, DIM]``."""
    shape = (count, HEADS + 2 * KV_HEADS, DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def append(cache, seq_id: int, qkv: np.ndarray) -> list[np.ndarray]:
    """One step with the same rows in all layers; the output of each."""
    with cache.forward([seq_id], [len(qkv)]):
        return [
            cache.attention(layer, qkv).numpy() for layer in range(len(cache.description["layers"]))
        ]


def attend(qkv: np.ndarray, num_new: int, window: int | None = None) -> np.ndarray:
    """Return the reference's results for the last rows of a sequence."""
    q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
    mask = reference.causal_mask(num_new, len(qkv), window)
    return reference.attention(q[-num_new:], k, v, mask, DIM**-0.5)[0]


def pump(sender, receiver) -> None:
    """Let both sides handle what has come, until nothing is left."""
    while receiver.poll() | sender.poll():
        pass


def state(cache) -> dict:
    """Return everything that a failed transfer must leave alone."""
    found = snapshot(cache, cache.sequence_ids())
    # An event: a copy that was given back was made all the same.
    del found["stats"]["cow_page_copies"]
    return found


def mark_send(cache, slots, seq_id=0, begin=0, peer=0):
    """The global function, with the arguments that no test changes at their places."""
    mark = tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_mark_send")
    return mark(cache, seq_id, begin, slots, peer)


class TransferPair:
    """A sequence of six positions on either side, and a request for nine more."""

    def __init__(self, **fields):
        self.source, self.target = caches(0, **fields)
        self.qkv = rows(0, 40)
        for cache in (self.source, self.target):
            cache.add_sequence(0)
            append(cache, 0, self.qkv[:6])
            cache.fork_sequence(0, 1)  # so that the last page is shared
        self.sender, self.receiver = connect(self.source, self.target, timeout=5.0)
        self.before = state(self.target)

    def begin(self):
        self.ticket = self.receiver.request(0, 9)
        return self.sender.next_request()

    def check(self):
        """The receiver's cache is as it was; the sender's holds nothing for anybody."""
        assert state(self.target) == self.before
        assert self.source.stats()["num_pinned_pages"] == 0
        assert self.source.stats()["num_send_blocks"] == 0
        self.source.check_integrity()
        self.target.check_integrity()


class MessageChannel(SocketChannel):
    """A channel for messages only."""

    expose = attach = read = None
