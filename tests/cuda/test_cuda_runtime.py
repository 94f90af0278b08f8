# SPDX-License-Identifier: Apache-2.0
"""The cache on a CUDA device that is emulated, streams and kernels, against the reference."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv

from .. import reference
from ..support.cases.caches.cache_cases import CachePair
from ..support.cases.caches.tree_cache_cases import split
from ..support.emulators.python_kernels import shuffle
from ..support.harness.in_child import failures
from ..support.worlds.permissive_steps import permissive_step

NUM_QO_HEADS, NUM_KV_HEADS, DIM, WINDOW = 4, 2, 16, 6
DTYPE = "float16"

pytestmark = pytest.mark.skipif(
    bool(tvm.cuda(0).exist), reason="this machine has the device that is emulated"
)


def make_cache(device, windows=(0, WINDOW)) -> pkv.KVCache:
    config = pkv.KVCacheConfig(
        num_layers=len(windows),
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        qk_head_dim=DIM,
        dtype=DTYPE,
        page_size=4,
        max_num_sequences=4,
        max_total_tokens=256,
        prefill_chunk_size=32,
        layers=[_layer(window) for window in windows],
    )
    cache = pkv.create(config, device=device.device)
    shuffle(cache, 3)
    return cache


def _layer(window: int) -> pkv.LayerSpec:
    return pkv.LayerSpec("mha_sliding", window=window) if window else pkv.LayerSpec("mha")


class DevicePair(CachePair):
    """The host goes ahead: inputs are there before the first step, results are read at the end."""

    def __init__(self, device, windows=(0, WINDOW), seed: int = 0):
        cache = make_cache(device, windows)
        rope = reference.Rope(rotary_dim=DIM)
        expected = reference.ReferenceCache(len(windows), np.dtype(DTYPE), rope, "normal", windows)
        super().__init__(cache, expected, seed)
        self.device = device
        self.results = []

    def prepare(self, steps) -> list:
        """Steps as `step` takes them, with the inputs and outputs of their layers."""
        return [
            (trees, [self._tensors(sum(split(trees)[1])) for _ in self._layers()])
            for trees in steps
        ]

    def _layers(self) -> range:
        return range(self.expected.num_layers)

    def _tensors(self, num_rows: int) -> tuple:
        qkv = self.normal(num_rows, NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM)
        out = tvm.runtime.empty((num_rows, NUM_QO_HEADS, DIM), DTYPE, self.device.device)
        return qkv, tvm.runtime.tensor(qkv, self.device.device), out

    def step(self, prepared) -> None:
        """A step of plain rows (how many by sequence) or of tree nodes (their parents)."""
        trees, tensors = prepared
        seq_ids, lengths, parents = split(trees)
        with self.cache.forward(seq_ids, lengths, parents):
            if parents is not None:
                self.expected.grow_trees(seq_ids, lengths, parents)
            for layer, (qkv, on_device, out) in enumerate(tensors):
                self.cache.attention(layer, on_device, out=out)
                o, _ = self.expected.attention(
                    layer, seq_ids, lengths, qkv, NUM_KV_HEADS, DIM**-0.5
                )
                # To free the input would stop the device.
                self.results.append((f"layer {layer} of {trees}", out, o, on_device))
        self.cache.check_integrity()

    def commit(self, leaves: dict[int, int]) -> None:
        self.cache.commit_tree(list(leaves), list(leaves.values()))
        for seq_id, leaf in leaves.items():
            self.expected.commit_tree(seq_id, leaf)

    def check(self) -> None:
        """Only now the host waits, and reads."""
        for what, out, o, _ in self.results:
            reference.assert_close(out.numpy(), o, DTYPE, what)
        self.results.clear()


STEPS = (
    {0: 9, 1: 5},
    {0: 7, 1: 1, 2: 3},
    {0: 1, 1: 1, 2: 1},
    {0: 1, 1: 1, 2: 1},
    {2: 1, 0: 2, 1: 1},
    {3: 1, 0: 1, 1: 1},
    {3: 2, 0: 1},
    {0: [-1, 0, 0, 1], 1: [-1, 0, -1]},
    {0: [2], 1: [1]},
    {0: 1, 1: 2, 3: 1},
)


def run(pair: DevicePair) -> None:
    steps = pair.prepare(STEPS)
    pair.add(0, 1, 2)
    for step in steps[:5]:
        pair.step(step)
    pair.fork(0, 3, 18)  # in the middle of a page: the next step copies it
    pair.pop(1, 2)
    pair.remove(2)
    for step in steps[5:9]:
        pair.step(step)
    pair.commit({0: 4, 1: 0})
    pair.step(steps[9])
    assert pair.cache.stats()["cow_page_copies"] > 0


@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_forwards_agree_with_the_reference(device, seed):
    pair = DevicePair(device, seed=seed)
    run(pair)
    assert device.num_pending() > 0  # no step has waited for its own kernels
    pair.check()


def prepared(device, num_steps: int = 5) -> tuple[DevicePair, list]:
    pair = DevicePair(device)
    pair.add(0, 1)
    return pair, pair.prepare([{0: 9, 1: 5}, *[{0: 1, 1: 1}] * (num_steps - 1)])


def test_the_host_is_at_most_four_steps_ahead(device):
    pair, steps = prepared(device, 9)
    device.wait_for_all()
    pending = []
    for step in steps:
        pair.step(step)
        pending.append(device.num_pending())
    of_a_step = pending[2] - pending[1]
    assert pending[0] > 0 and of_a_step > 0
    # In every second step it waits for the two that are three and four steps back.
    assert pending[5:] == [4 * of_a_step, 3 * of_a_step] * 2
    pair.check()


def _run_without(device, event: int) -> int:
    """How many events there are, and one of them has no effect."""
    pair, steps = prepared(device, 7)
    begin = device.num_events()
    with device.without_event(event):
        for step in steps:
            pair.step(step)
    return device.num_events() - begin


def test_every_event_is_needed(device):
    num_events = _run_without(device, -1)
    assert num_events == 7 + 3  # one a step, and one for each pair of turns before the last
    # The last but one lets a step later than these overwrite the arrays of the two before.
    for event in {*range(num_events)} - {num_events - 2}:
        with pytest.raises(RuntimeError, match="without an event between"):
            _run_without(device, event)


def test_the_host_waits_before_it_writes_what_is_copied(device):
    pair, steps = prepared(device)
    with device.without_host_waits():
        for step in steps:
            pair.step(step)
    with pytest.raises(RuntimeError, match="still to read"):
        device.wait_for_all()


def test_rows_that_are_not_aligned_are_refused(device):
    """Kernels take 16 bytes at a time, and would fail on the device, where nothing tells of it."""
    cache = make_cache(device)
    cache.add_sequence(0)
    shape = (2, NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM)
    whole = tvm.runtime.empty((2 * np.prod(shape),), DTYPE, device.device)
    shifted = [whole._create_view(shape, DTYPE, num_bytes) for num_bytes in (0, 8)]
    out = [whole._create_view((2, NUM_QO_HEADS, DIM), DTYPE, num_bytes) for num_bytes in (0, 2)]
    with permissive_step(cache, [0], [2]):
        for qkv, o, name in ((shifted[1], out[0], "qkv"), (shifted[0], out[1], "o")):
            with pytest.raises(ValueError, match=f"{name} must start at a multiple of 16 bytes"):
                cache.attention(0, qkv, out=o)
    assert cache.stats()["copied_inputs"] == 0
    cache.check_integrity()


def test_the_host_cannot_touch_the_device(device):
    tensor = tvm.runtime.empty((4,), DTYPE, device.device)
    (text,) = failures([("a read", lambda: ctypes.string_at(tensor.data_ptr(), 4))])
    assert text.endswith("signal 11")


def test_a_device_that_is_not_there():
    config = pkv.KVCacheConfig(num_layers=1, num_qo_heads=1, num_kv_heads=1, qk_head_dim=8)
    for arguments in ({"device": tvm.cuda(0)}, {"target": "cuda"}):
        with pytest.raises(RuntimeError, match="there is no device cuda:0"):
            pkv.create(config, **arguments)
    for target, device in (("cuda", tvm.cpu()), ("native", tvm.cuda(0))):
        with pytest.raises(ValueError, match="is not for device"):
            pkv.create(config, target, device)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
