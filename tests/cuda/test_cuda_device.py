# SPDX-License-Identifier: Apache-2.0
"""What a cache asks of a device: calls and stops in a step, memory, transfers, checkpoints.

The device is emulated; the kernels are in NumPy, launched on it.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tvm_pagedkv import page
from tvm_pagedkv.compiler.cuda import library as cuda_library
from tvm_pagedkv.transfer import SharedMemoryChannel, _runtime

from .. import reference
from ..support.cases.caches.cache_cases import DIM, HEADS, NUM_QO_HEADS, layer_of
from ..support.cases.caches.checkpoint_cases import Fed, export, forked, restore
from ..support.cases.caches.transfer_cases import TransferPair, append, attend, pump
from ..support.cases.caches.tree_cache_cases import TreePair
from ..support.emulators.python_kernels import KERNELS, LAYER, copy_pages, make_cache, snapshot
from ..support.emulators.python_tree_kernels import KERNELS_WITH_TREES


@pytest.fixture(autouse=True)
def nothing_left(device):
    """What earlier tests have left on the device is not freed within a test that counts."""
    gc.collect()


# --- what a step costs --------------------------------------------------------------------------

IDS = [0, 1, 2]
A_STEP = {"copies to the device": 1, "events": 1.5, "waits": 0.5}


class Steps:
    """A cache of three sequences, with what a step needs on the device already."""

    def __init__(self, device, kernels=KERNELS_WITH_TREES, **fields):
        self.device = device
        fields = {"max_total_tokens": 512, "layers": [LAYER, layer_of(6)]} | fields
        kernels = [device.kernels(kernels)]
        self.cache = make_cache(kernels, device=device.device, **fields)
        self.kept = {}
        for seq_id in IDS:
            self.cache.add_sequence(seq_id)
        self.step([9, 5, 7])

    def step(self, lengths: list[int], parents: list[int] | None = None) -> None:
        num_rows = sum(lengths)
        if num_rows not in self.kept:
            o = tvm.runtime.empty((num_rows, NUM_QO_HEADS, DIM), "float32", self.device.device)
            self.kept[num_rows] = self.device.put(np.zeros((num_rows, HEADS, DIM), "f4")), o
        qkv, o = self.kept[num_rows]
        with self.cache.forward(IDS, lengths, parents):
            for layer in range(len(self.cache.description["layers"])):
                self.cache.attention(layer, qkv, out=o)

    def calls(self, step, num_steps: int = 8, keeps_up: bool = True) -> dict:
        """Return the host's calls per step, averaged after a warm-up."""
        for _ in range(8):
            step()
        with self.device.counted() as calls:
            for _ in range(num_steps):
                if keeps_up:
                    self.device.wait_for_all()
                step()
        return {what: count / num_steps for what, count in calls.items()}


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1, 3]], ids=["decode", "prefill"])
def test_a_step_does_not_stop_the_host(device, lengths):
    steps = Steps(device)
    assert steps.calls(lambda: steps.step(lengths)) == A_STEP


def test_a_step_with_shared_prefixes_copies_once(device):
    steps = Steps(device, layers=[LAYER])
    for seq_id in IDS[1:]:
        steps.cache.remove_sequence(seq_id)
        steps.cache.fork_sequence(0, seq_id)
    tvm_ffi.get_global_func("pagedkv.share_every_prefix")(steps.cache)
    assert steps.calls(lambda: steps.step([1, 1, 1])) == A_STEP
    stats = steps.cache.stats()
    assert stats["step_pages_read"] < stats["step_pages_read_without_sharing"]


def test_forks_do_not_stop_the_host(device):
    """Copies of their pages have arrays of their own, for all sequences together."""
    steps = Steps(device, KERNELS_WITH_TREES | {"copy_pages": copy_pages}, max_total_tokens=2048)

    def step() -> None:
        for seq_id in IDS[1:]:
            steps.cache.remove_sequence(seq_id)
            steps.cache.fork_sequence(0, seq_id)
        steps.step([1, 1, 1])

    copied = steps.cache.stats()["cow_page_copies"]
    calls = steps.calls(step)
    assert calls.keys() == A_STEP.keys() and calls["copies to the device"] < 2
    assert steps.cache.stats()["cow_page_copies"] > copied + 16


@pytest.mark.parametrize("left_out", [None, "compact_copy"], ids=["kernel", "copies"])
def test_a_commit_does_not_stop_the_host(device, left_out):
    """A launch for each layer; without the kernel a copy for each row."""
    kernels = {name: each for name, each in KERNELS_WITH_TREES.items() if name != left_out}
    steps = Steps(device, kernels)

    def step() -> None:
        steps.step([3, 3, 3], [-1, 0, 0] * 3)
        steps.cache.commit_tree(IDS, [2, 1, 2])
        for seq_id in IDS:
            steps.cache.pop_n(seq_id, 2)

    calls = steps.calls(step)
    num_rows = calls.pop("copies on the device", 0)
    assert calls == {what: 2 * count for what, count in A_STEP.items()}
    assert bool(num_rows) == bool(left_out)
    assert steps.cache.stats()["moved_tree_nodes"] > 0


def test_the_host_is_never_far_ahead(device):
    steps = Steps(device)
    calls = steps.calls(lambda: steps.step([1, 1, 1]), keeps_up=False)
    assert calls == A_STEP | {"stops": 0.5}
    pending, of_a_step = [], 2 * 3 + 1  # kernels of two layers, and a copy
    for _ in range(8):
        steps.step([1, 1, 1])
        pending.append(device.num_pending())
    assert max(pending) <= 4 * of_a_step


# --- a commit that fails ------------------------------------------------------------------------


def test_a_commit_that_fails_keeps_what_was_committed(device):
    """When its first launch fails nothing has changed; later the nodes are lost, and no more."""
    left = [10**6]

    def failing(*args):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("cannot launch")
        device.launch(KERNELS_WITH_TREES["compact_copy"], *args)

    kernels = device.kernels(KERNELS_WITH_TREES) | {"compact_copy": failing}
    pair = TreePair((0, 5), kernels=kernels, device=device.device)
    pair.add(0, 1)
    pair.step({0: 9, 1: 3})
    pair.cache.fork_sequence(1, 2)  # the commit copies its last page
    pair.expected.fork_sequence(1, 2, -1)
    pair.step({0: [-1, 0, 0], 1: [-1, -1, 1], 2: [-1]})
    before = pair.snapshot()
    left[0] = 0
    with pytest.raises(RuntimeError, match="cannot launch"):
        pair.cache.commit_tree([0, 1], [2, 2])
    after = pair.snapshot()
    for name in ("aux_bytes", "allocated_bytes", "aux_bytes_copied"):
        after["stats"][name] = before["stats"][name]
    assert after == before
    left[0] = 1
    with pytest.raises(RuntimeError, match="cannot launch"):
        pair.cache.commit_tree([0, 1], [2, 2])
    pair.cache.check_integrity()
    for seq_id in (0, 1):
        pair.expected.commit_tree(seq_id, -1)
    left[0] = 10**6
    pair.check_rows()
    pair.commit({2: 0})
    pair.step({0: [-1, 0, 0], 1: [-1, 0], 2: [-1]})
    pair.commit({0: 2, 1: 1, 2: 0})


# --- memory -------------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_leaves_nothing(device):
    before = device.room()
    fields = {"layers": [LAYER, layer_of(6)], "device": device.device}
    kernels = device.kernels(KERNELS)
    with device.counted() as calls:
        cache = make_cache(kernels, **fields)
    num_allocations, num_bytes = calls["allocations"], before - device.room()
    del cache
    assert device.room() == before and num_allocations > 10
    room = 0
    with device.counted() as calls:
        while room < num_bytes:
            device.set_room(room)
            with pytest.raises(MemoryError, match=r"cannot allocate \d+ bytes: .*out of memory"):
                make_cache(kernels, **fields)
            assert device.room() == room
            room += 997
        device.set_room(num_bytes)
        make_cache(kernels, **fields)
        assert device.room() == num_bytes
        device.set_room(before)
    assert calls["streams made"] == calls["streams freed"] > 0
    assert calls["allocations"] - calls["frees"] >= num_bytes // 997  # those that failed


# --- other GPUs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "runs"),
    [
        ({("sass", 80)}, True),  # the device is of 8.0
        ({("ptx", 75)}, True),
        ({("sass", 86), ("sass", 90)}, False),
        ({("sass", 75), ("ptx", 90)}, False),
        (set(), False),
    ],
    ids=["same", "older_ptx", "later", "later_ptx", "none"],
)
def test_kernels_of_other_gpus(device, tmp_path, held, runs):
    device.held = {cuda_library.DeviceCode(*code) for code in held}
    if runs:
        cuda_library.require_code_for(device.device, tmp_path)
        return
    named = ", ".join(f"{kind} {arch}" for kind, arch in sorted(held)) or "nothing"
    with pytest.raises(RuntimeError, match=f"of compute capability 8.0: .* holds {named}"):
        cuda_library.require_code_for(device.device, tmp_path)


def test_a_cache_is_not_made_of_kernels_for_other_gpus(device):
    device.held = {cuda_library.DeviceCode("sass", 90)}
    config = pkv.KVCacheConfig(
        num_layers=1, num_qo_heads=4, num_kv_heads=2, qk_head_dim=16, dtype="float16", page_size=4
    )
    before = device.room()
    with pytest.raises(RuntimeError, match="the kernels cannot run on cuda:0"):
        pkv.create(config, device=device.device)
    assert device.room() == before


# --- checkpoints and transfers ------------------------------------------------------------------

CUDA_HOST = 3  # DLPack's number of page-locked memory


@pytest.mark.parametrize("kind", ["mixed", "all"])
def test_sequences_are_saved_and_loaded(device, tmp_path, kind):
    """A checkpoint goes from the device to a file, and back to the device and to the host."""
    source = forked(kind, emulated=device)
    source.cache.save(tmp_path / "chats", [3, 4, 5])
    wanted = source.step({3: 1, 5: 2, 4: 1}, salt=9)
    for emulated in (device, None):
        other = Fed(kind, seed=5, emulated=emulated)
        other.cache.load(tmp_path / "chats")
        other.rows = {i: [tuple(x[: len(x) - n] for x in planes) for planes in source.rows[i]]
                      for i, n in {3: 1, 4: 1, 5: 2}.items()}  # fmt: skip
        for seq_id in (3, 4, 5):
            other.check(seq_id)
        for out, want in zip(other.step({3: 1, 5: 2, 4: 1}, salt=9), wanted, strict=True):
            np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_page_groups_go_through_memory_of_the_host(device, pinned):
    source = forked(emulated=device)
    metadata, groups = export(source.cache, 3)
    if pinned:
        host = tvm.runtime.device(CUDA_HOST, 0)
        groups = [tvm.runtime.empty(g.shape, g.dtype, host) for g in groups]
        for group, out in enumerate(groups):
            call = tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_export_page_group")
            call(source.cache, 3, group, out)
    other = Fed("all", seed=2, emulated=device)
    restore(other.cache, 8, (metadata, groups))
    other.rows[8] = source.rows[3]
    other.check(8)


@pytest.mark.parametrize("is_other", [False, True], ids=["same_stream", "other_stream"])
def test_rows_go_from_one_device_cache_to_another(device, is_other):
    """They are there when the receiver is told, and may change once they were read."""
    pair = TransferPair(kernels=device.kernels(KERNELS), device=device.device)
    request = pair.begin()
    send = pair.sender.send(request, 0)
    new, outputs = [device.put(pair.qkv[6:15]) for _ in range(2)], []
    with pair.source.forward([0], [9]):  # the host goes ahead
        for layer in range(2):
            outputs.append(pair.source.attention(layer, new[layer]))
    pair.sender.finish(send)
    stream = device.device.create_raw_stream()
    with tvm_ffi.use_raw_stream(device.device, stream) if is_other else nullcontext():
        pump(pair.sender, pair.receiver)
        pair.receiver.wait(pair.ticket)
    for cache in (pair.source, pair.target):
        out = append(cache, 0, pair.qkv[15:16])
        reference.assert_close(out[0], attend(pair.qkv[:16], 1), "float32", "after the transfer")


def test_rows_go_from_a_device_to_the_host(device):
    source = make_cache(device.kernels(KERNELS), device=device.device)
    target = make_cache()
    for cache in (source, target):
        cache.add_sequence(0)
    qkv = np.random.default_rng(0).standard_normal((4, HEADS, DIM)).astype("f4")
    append(source, 0, qkv)
    append(target, 0, np.zeros_like(qkv))
    for layer in range(2):
        pools = [_runtime.pages_of(cache, layer) for cache in (target, source)]
        num_bytes = int(np.prod(pools[0].shape[1:])) * 4
        (to,), (start,) = target.page_table(0), source.page_table(0)
        _runtime.copy_regions(*pools, np.array([[to * num_bytes, start * num_bytes, num_bytes]]))
    for got, want in zip(target.debug_get_kv(0), source.debug_get_kv(0), strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())
        assert got.numpy().any()  # the target had zeros


def test_channels_of_the_host_refuse_caches_of_a_device(device):
    cache = make_cache(device.kernels(KERNELS), device=device.device, enable_kv_transfer=True)
    channel = SharedMemoryChannel.__new__(SharedMemoryChannel)
    with pytest.raises(ValueError, match="a SharedMemoryChannel sends from caches on the CPU"):
        channel.expose(cache)


# --- the rest -----------------------------------------------------------------------------------


def test_rows_are_overwritten_and_read(device):
    cache = make_cache(device.kernels(KERNELS), device=device.device)
    cache.add_sequence(0)
    append(cache, 0, np.zeros((6, HEADS, DIM), "f4"))
    cache.fork_sequence(0, 1)
    before = snapshot(cache, [1])[1]
    k, v = np.random.default_rng(1).standard_normal((2, 2, 3, 2, DIM)).astype("f4")
    cache.debug_set_kv(0, 2, k, v)
    for got, want in zip(cache.debug_get_kv(0, 2, 5), (k, v), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)
    assert snapshot(cache, [1])[1][2:] == before[2:]  # the fork keeps what it has
    assert "sequence 1 (6): 0 1" in cache.draw()


def test_a_stage_keeps_its_layers(device):
    stage = {"layer_indptr": tvm_ffi.Shape([0, 1, 3]), "stage": 1}
    cache = make_cache(device.kernels(KERNELS), device=device.device, num_layers=3, **stage)
    assert [layer["id"] for layer in cache.description["layers"]] == [1, 2]
    cache.add_sequence(0)
    qkv = np.random.default_rng(2).standard_normal((5, HEADS, DIM)).astype("f4")
    with cache.forward([0], [5]):
        for layer in (1, 2):
            out = cache.attention(layer, qkv).numpy()
            reference.assert_close(out, attend(qkv, 5), "float32", f"layer {layer}")
        with pytest.raises(IndexError, match="layer 0"):
            cache.attention(0, qkv)


def test_pages_of_a_device_are_refused_by_functions_of_the_host(device):
    pages = tvm.runtime.empty((2, 2, 4, 2, 8), "float32", device.device)
    rows = np.zeros((1, 2, 8), "f4")
    numbers = [np.array(x, "int32") for x in ([0], [0], [0], [0, 1], [1])]
    with pytest.raises(ValueError, match="these functions run on CPUs"):
        page.append_paged_kv_cache(rows, rows, numbers[0], numbers[1], pages, *numbers[2:])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
