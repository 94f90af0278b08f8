# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels for CPUs borrow: the cache owns it and counts it, and its size is known."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ...support.emulators.python_kernels import share_every_prefix

HEADS, KV_HEADS, DIM = 8, 2, 64
MLA = pkv.LayerSpec("mla", num_kv_heads=1, qk_head_dim=192, v_head_dim=128)
LAYERS = {
    "plain": None,
    "int8": None,
    "window": [pkv.LayerSpec("mha_sliding", 100)] * 2,
    "mla": [MLA] * 2,
    "mla and plain": [MLA, pkv.LayerSpec()],
}


def config_of(name: str) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=2,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qk_head_dim=DIM,
        dtype="float32",
        kv_dtype="int8" if name == "int8" else None,
        max_num_sequences=8,
        max_total_tokens=4096,
        prefill_chunk_size=512,
        layers=LAYERS[name],
    )


class World:
    """A cache over compiled kernels, which steps with zeros."""

    def __init__(self, config: pkv.KVCacheConfig):
        self.config, self.cache = config, pkv.create(config)
        self.kinds = [layer.kind for layer in config.resolved().layers]

    def step(self, seq_ids, lengths, tree=None) -> None:
        rows = sum(lengths)
        with self.cache.forward(seq_ids, lengths, tree):
            for layer, kind in enumerate(self.kinds):
                if kind == "mla":
                    self.cache.append_mla_kv(layer, np.zeros((rows, 192), "float32"))
                    q = np.zeros((rows, HEADS, 192), "float32")
                    self.cache.cross_attention(layer, q, 0.1)
                else:
                    qkv = np.zeros((rows, HEADS + 2 * KV_HEADS, DIM), "float32")
                    self.cache.attention(layer, qkv)

    def step_in_every_way(self) -> None:
        """Prefill, decode, decode over shared pages and token trees; then as it was before."""
        self.cache.add_sequence(0)
        self.step([0], [512])
        self.step([0], [512])
        self.cache.fork_sequence(0, 1)
        for ids in ([0], [0, 1]):
            self.step(ids, [1] * len(ids))
        self.step([1, 0], [4, 4], [-1, 0, 0, 1] * 2)
        self.cache.commit_tree([1, 0], [2, 1])
        self.step([0, 1], [17, 1])
        for seq_id in (0, 1):
            self.cache.remove_sequence(seq_id)

    def scratch(self) -> int:
        """The bytes of it, which are a part of what is allocated."""
        stats = self.cache.stats()
        parts = ("page_pool_bytes", "workspace_bytes", "aux_bytes", "scratch_bytes")
        assert stats["allocated_bytes"] == sum(stats[part] for part in parts)
        return stats["scratch_bytes"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_cache_owns_and_counts_it(name):
    world = World(config_of(name))
    assert world.scratch() == 0
    assert world.cache.stats()["allocated_bytes"] == world.config.memory_bytes()
    share_every_prefix(world.cache)
    world.step_in_every_way()
    used, known = world.scratch(), pkv.scratch_bytes(world.config)
    assert known / 4 < used <= known  # no layer needs all of its kernels here
    for _ in range(2):
        world.step_in_every_way()
    assert world.scratch() == used


def test_it_grows_with_the_number_of_threads():
    sizes = [pkv.scratch_bytes(config_of("plain"), num_threads=n) for n in (1, 2, 64)]
    assert sizes[0] < sizes[1] < sizes[2] <= 64 * sizes[0]


def test_a_step_without_memory_fails_and_can_be_repeated():
    code = "from tests.cache.steps.test_scratch import fail_in_this_process as fail; fail()"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr


def fail_in_this_process() -> None:
    """Step with so many threads that no machine has the memory for their tiles, then with one."""
    threads = [1 << 30]
    tvm_ffi.register_global_func("runtime.NumThreads", lambda: threads[0], override=True)
    world = World(config_of("plain"))
    world.cache.add_sequence(0)
    before = world.cache.stats()
    with pytest.raises(RuntimeError, match="no memory for the buffers of a task"):
        world.step([0], [512])
    world.cache.check_integrity()
    after = world.cache.stats()
    for name in ("num_free_pages", "total_tokens", "aux_bytes"):
        assert after[name] == before[name], name
    threads[0] = 1
    world.cache.remove_sequence(0)
    world.step_in_every_way()
    assert 0 < world.scratch() <= pkv.scratch_bytes(world.config)


def test_two_threads_have_the_memory_of_their_caches():
    worlds = [World(config_of(name)) for name in ("plain", "mla")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda world: [world.step_in_every_way() for _ in range(3)], worlds))
    assert all(0 < w.scratch() <= pkv.scratch_bytes(w.config) for w in worlds)


def test_it_is_freed_with_the_cache():
    class Mallinfo(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
                *("fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        ]

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2 in this C library")
    libc.mallinfo2.restype = Mallinfo

    def allocated() -> int:
        gc.collect()
        info = libc.mallinfo2()
        return info.uordblks + info.hblkhd

    def live() -> int:
        world = World(config_of("mla"))
        world.step_in_every_way()
        return world.scratch()

    size = live()
    before = allocated()
    for _ in range(8):
        live()
    assert allocated() < before + 2 * size


def test_mistakes():
    with pytest.raises(ValueError, match="CPU"):
        pkv.scratch_bytes(config_of("plain"), "cuda")
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"num_threads must .*got {number}"):
            pkv.scratch_bytes(config_of("plain"), num_threads=number)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
