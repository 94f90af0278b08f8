# SPDX-License-Identifier: Apache-2.0
"""Calls of a cache on several streams of a GPU, which is emulated; kernels are in NumPy.

The emulated device refuses work that touches what another stream touches without an event between.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import tvm
import tvm_ffi

from .. import reference
from ..support.cases.caches.cache_cases import DIM, HEADS, PlainPair
from ..support.cases.caches.tree_cache_cases import TreePair
from ..support.emulators.python_kernels import KERNELS, copy_pages, make_cache
from ..support.emulators.python_tree_kernels import KERNELS_WITH_TREES

RACE = "without an event between"


@contextmanager
def other_stream(device):
    """A stream that is current here, and that nobody may name after it."""
    stream = device.device.create_raw_stream()
    with tvm_ffi.use_raw_stream(device.device, stream):
        yield stream
    device.retire_stream(stream)


def pair_on(device, **fields) -> PlainPair:
    kernels = device.kernels({**KERNELS, "copy_pages": copy_pages})
    pair = PlainPair(make_cache(kernels, device=device.device, **fields))
    pair.add(0, 1)
    pair.step([0, 1], [6, 3])
    return pair


def step_across_streams(device, pair: PlainPair, elsewhere: tuple[int, ...]) -> None:
    """A step of two layers, of which some are on a stream of their own; compared with NumPy."""
    qkv = np.random.default_rng(1).standard_normal((3, HEADS, DIM)).astype("float32")
    inputs, outputs = [], []  # to free one would stop the host until the device is idle
    with pair.cache.forward([0, 1], [1, 2]):
        for layer in range(2):
            with other_stream(device) if layer in elsewhere else nullcontext():
                inputs.append(device.put(qkv))
                outputs.append(pair.cache.attention(layer, inputs[-1]))
    assert device.num_pending() > 0
    device.wait_for_all()
    for layer, out in enumerate(outputs):
        expected, _ = pair.expected.attention(layer, [0, 1], [1, 2], qkv, 2, DIM**-0.5)
        reference.assert_close(out.numpy(), expected, "float32", f"layer {layer}")


@pytest.mark.parametrize("elsewhere", [(0,), (1,), (0, 1)], ids=str)
def test_layers_on_streams_of_their_own(device, elsewhere):
    pair = pair_on(device)
    step_across_streams(device, pair, elsewhere)
    pair.step([0], [2])
    pair.check_rows()


@pytest.mark.parametrize("edge", ["to the call", "from the call"])
def test_either_edge_is_needed(device, edge):
    """Without it kernels race: the device refuses what it would compute wrongly."""
    pair = pair_on(device)
    with device.counted() as calls:
        step_across_streams(device, pair, ())
    num_own = calls["events"]
    pair = pair_on(device)
    with device.counted() as calls:
        step_across_streams(device, pair, (0,))
    assert calls["events"] == num_own + 2
    # Those of the step's own arrays come first, then those around layer 0.
    pair = pair_on(device)
    with device.without_event(num_own + (edge == "from the call")):
        with pytest.raises(RuntimeError, match=RACE):
            step_across_streams(device, pair, (0,))


def test_steps_on_streams_that_come_and_go(device):
    """Nobody keeps the stream of a step after it: the next one is on another."""
    pair = pair_on(device)
    for _ in range(6):
        with other_stream(device):
            step_across_streams(device, pair, (1,))
    step_across_streams(device, pair, (0,))
    pair.check_rows()


def test_a_step_that_is_aborted_on_another_stream(device):
    pair = pair_on(device)
    qkv = np.ones((2, HEADS, DIM), "float32")
    with other_stream(device), pytest.raises(ZeroDivisionError):
        with pair.cache.forward([0], [2]):
            pair.cache.attention(0, device.put(qkv))
            raise ZeroDivisionError
    pair.step([0], [2])
    pair.check_rows()


def test_copies_of_shared_pages(device):
    """A fork is written on one stream, after its parent was on another."""
    pair = pair_on(device)
    pair.fork(0, 5, -1)
    with other_stream(device):
        pair.step([5], [1])
    pair.step([0], [1])
    pair.check_rows()


def test_commits_of_token_trees(device):
    pair = TreePair((0, 5), kernels=device.kernels(KERNELS_WITH_TREES), device=device.device)
    pair.add(0, 1)
    pair.step({0: 9, 1: 3})
    for _ in range(3):
        pair.step({0: [-1, 0, 0], 1: [-1, -1, 1]})
        with other_stream(device):
            pair.commit({0: 2, 1: 2})
    pair.check_rows()


def test_rows_are_read_and_written_on_another_stream(device):
    pair = pair_on(device)
    k, v = np.random.default_rng(2).standard_normal((2, 2, 2, 2, DIM)).astype("float32")
    with other_stream(device):
        pair.cache.debug_set_kv(0, 1, k, v)
    read = pair.cache.debug_get_kv(0, 1, 3)
    for got, want in zip(read, (k, v), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


class Producer:
    """A tensor that another library still writes on a stream of its own."""

    def __init__(self, device, array: np.ndarray, knows_versions: bool):
        self.device, self.stream = device, device.device.create_raw_stream()
        self.knows_versions, self.asked = knows_versions, []
        with tvm_ffi.use_raw_stream(device.device, self.stream):
            self.tensor = device.put(array)
        self.shape = array.shape

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **versions):
        if versions and not self.knows_versions:
            raise TypeError("unexpected keyword arguments")
        self.asked.append(stream)
        if stream not in (None, -1):
            order = tvm_ffi.get_global_func("runtime.Device_StreamSyncFromTo")
            order(self.device.device, self.stream, 0 if stream == 1 else stream)
        return self.tensor.__dlpack__(**versions)


@pytest.mark.parametrize("knows_versions", [True, False], ids=["dlpack 1", "dlpack 0"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["default stream", "other stream"])
def test_producers_are_waited_for(device, elsewhere, knows_versions):
    pair = pair_on(device)
    qkv = np.random.default_rng(3).standard_normal((2, HEADS, DIM)).astype("float32")
    with other_stream(device) if elsewhere else nullcontext():
        producers = [Producer(device, qkv, knows_versions) for _ in range(2)]
        with pair.cache.forward([0], [2]):
            outputs = [pair.cache.attention(i, producers[i]) for i in range(2)]
        assert all(each.asked != [None] and len(each.asked) == 1 for each in producers)
        assert all((each.asked == [1]) != elsewhere for each in producers)
    device.wait_for_all()
    for layer, out in enumerate(outputs):
        expected, _ = pair.expected.attention(layer, [0], [2], qkv, 2, DIM**-0.5)
        reference.assert_close(out.numpy(), expected, "float32", f"layer {layer}")


def test_a_producer_that_is_not_waited_for_is_refused(device):
    """Without the protocol the test above fails."""
    pair = pair_on(device)
    producer = Producer(device, np.ones((2, HEADS, DIM), "float32"), True)
    with pytest.raises(RuntimeError, match=RACE), pair.cache.forward([0], [2]):
        pair.cache.attention(0, tvm.runtime.from_dlpack(producer.tensor))


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_staging_of_flashinfer_is_not_refilled_in_flight(device, waits):
    """FlashInfer fills page-locked memory and queues a copy of it; the host is two plans ahead."""
    num_plans = 0

    def plan(float_workspace, int_workspace, staging, *_):
        nonlocal num_plans
        num_plans += 1
        ctypes.memset(staging.data_ptr(), num_plans, 64)
        staging.copyto(int_workspace)
        return [num_plans]

    tag = "flashinfer"
    functions = {n: [tag, tvm_ffi.convert(lambda *_: None), tvm_ffi.convert(plan)]
                 for n in ("prefill", "decode", "prefill_ragged")}  # fmt: skip
    kernels = device.kernels({n: k for n, k in KERNELS.items() if n not in functions})
    cache = make_cache({**kernels, **functions}, device=device.device)
    cache.add_sequence(0)
    inputs = device.put(np.ones((2, HEADS, DIM), "float32"))
    outputs = [tvm.runtime.empty((2, 4, DIM), "float32", device.device) for _ in range(2)]
    for each in outputs:
        device.launch(lambda array: None, each)
    overwritten = pytest.raises(RuntimeError, match="the host wrote what a queued copy was still")
    with nullcontext() if waits else overwritten:
        with nullcontext() if waits else device.without_host_waits():
            for _ in range(6):
                with cache.forward([0], [2]):
                    for layer in range(2):
                        cache.attention(layer, inputs, out=outputs[layer])
        device.wait_for_all()
    assert num_plans == 6


def test_slots_are_handed_out_when_nothing_uses_them(device):
    """Who writes to them from elsewhere waits for no stream."""
    pair = pair_on(device)
    qkv = np.ones((30, HEADS, DIM), "float32")
    pair.add(7)
    inputs = device.put(qkv)
    with pair.cache.forward([7], [30]):
        outputs = [pair.cache.attention(layer, inputs) for layer in range(2)]
    pair.cache.remove_sequence(7)
    assert device.num_pending() > 0
    tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")(pair.cache, 0, 30)
    assert device.num_pending() == 0 and len(outputs) == 2


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
