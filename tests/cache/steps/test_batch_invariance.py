# SPDX-License-Identifier: Apache-2.0
"""Bits of a sequence's rows do not depend on the batch, its order, the threads, or the pages."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv

from ...support.harness.selections import all_slow_but

NUM_THREADS = "runtime.NumThreads"
HEADS, KV_HEADS, DIM = 6, 3, 32  # which no other test has: kernels ask for the threads below
CHUNK = 1300
# Rows of each step of a sequence; "long" and "middle" are cut into several segments.
SCRIPTS = {
    "long": (1050, 31, 1, 1, 3),
    "middle": (200, 101, 1, 1, 5),
    "short": (9, 4, 1, 1, 2),
    "single": (1, 1, 2, 1, 1),
}


class Threads:
    """Tells kernels a number of threads; TVM's pool runs their tasks on those that it has."""

    def __init__(self):
        self.real, self.count, self.calls = tvm.get_global_func(NUM_THREADS), 0, 0

    def __call__(self) -> int:
        self.calls += 1
        return self.count or self.real()


@pytest.fixture(scope="module")
def told_threads():
    told = Threads()  # kernels that have asked it will ask it again
    tvm_ffi.register_global_func(NUM_THREADS, told, override=True)
    yield told
    tvm_ffi.register_global_func(NUM_THREADS, told.real, override=True)


@pytest.fixture
def threads(told_threads):
    told_threads.calls = 0
    yield told_threads
    assert told_threads.calls, "the kernels have been loaded by another test, and ask TVM"
    told_threads.count = 0


@dataclass
class Case:
    """A cache, and how its layer attends.

    Parameters
    ----------
    config : dict
        Fields of the configuration.
    layer : LayerSpec, optional
    window : (size, sinks), optional
        The window that sequences get.
    lists : {None, "positions", "blocks", "budget"}
    """

    config: dict = field(default_factory=dict)
    layer: pkv.LayerSpec | None = None
    window: tuple[int, int] | None = None
    lists: str | None = None

    def create(self, max_total_tokens: int) -> pkv.KVCache:
        layers = None if self.layer is None else [self.layer]
        fields = {
            "num_layers": 1,
            "num_qo_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "qk_head_dim": DIM,
            "dtype": "float32",
            "max_num_sequences": 8,
            "max_total_tokens": max_total_tokens,
            "prefill_chunk_size": 2 * CHUNK,
            "layers": layers,
        }
        return pkv.create(pkv.KVCacheConfig(**{**fields, **self.config}))

    @property
    def is_latent(self) -> bool:
        return self.layer is not None and self.layer.kind == "mla"

    @property
    def mixes(self) -> bool:
        """Whether steps in which each sequence has one row attend as others do.

        Of MLA layers, attention over pages leaves out the rows of other steps. Only steps with one
        row each have a budget.
        """
        return not self.is_latent and self.lists != "budget"

    @property
    def scripts(self) -> list[str]:
        return [name for name in SCRIPTS if name != "single" or self.mixes]


MLA = {"num_kv_heads": 1, "qk_head_dim": 96, "v_head_dim": 64}
CASES = {
    "float32": Case(),
    "float16": Case({"dtype": "float16"}),
    "bfloat16": Case({"dtype": "bfloat16"}),
    "int8": Case({"kv_dtype": "int8"}),
    "int4": Case({"kv_dtype": "int4", "dtype": "float16"}),
    "float8": Case({"kv_dtype": "float8_e4m3fn"}),
    "two widths": Case({"v_head_dim": 16}),
    "inline": Case({"rope": pkv.RopeConfig(mode="inline")}),
    "alibi": Case({"alibi": True, "rope": pkv.RopeConfig(mode="none")}),
    "window": Case(layer=pkv.LayerSpec("mha_sliding", window=600)),
    "chunked": Case(layer=pkv.LayerSpec("mha_chunked", window=512)),
    "window of sequences": Case(
        {"sliding_window": True, "rope": pkv.RopeConfig(mode="inline")}, window=(400, 20)
    ),
    "positions": Case(layer=pkv.LayerSpec(lists=True), lists="positions"),
    "blocks": Case(layer=pkv.LayerSpec(lists=True), lists="blocks"),
    "budget": Case(layer=pkv.LayerSpec(page_bounds=True), lists="budget"),
    "mla": Case(layer=pkv.LayerSpec("mla", **MLA)),
    "mla window": Case(layer=pkv.LayerSpec("mla", window=300, **MLA)),
    "mla bfloat16": Case({"dtype": "bfloat16"}, layer=pkv.LayerSpec("mla", **MLA)),
    "mla positions": Case(layer=pkv.LayerSpec("mla", lists=True, **MLA), lists="positions"),
}
OFTEN = ("float32", "float16", "int4", "window", "window of sequences", "blocks", "mla")


class World:
    """Sequences that go on by their scripts."""

    def __init__(self, case: Case, cache: pkv.KVCache):
        self.case, self.cache = case, cache
        self.dtype = np.dtype(cache.description["dtype"])
        self.ids: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.results: dict[str, list[np.ndarray]] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.ids[name] = len(self.ids) + 10
            self.cache.add_sequence(self.ids[name])
            if self.case.window is not None:
                self.cache.enable_sliding_window(self.ids[name], *self.case.window)
            self.lengths[name], self.results[name] = 0, []

    def step(self, *steps: tuple[str, int]) -> None:
        """Take a step with a number of rows of each sequence."""
        rows = [self._rows(*each) for each in steps]
        with self.cache.forward([self.ids[name] for name, _ in steps], [n for _, n in steps]):
            o = self._attend(np.concatenate(rows), steps)
        begin = 0
        for name, n in steps:
            self.results[name].append(o[begin : begin + n])
            self.lengths[name] += n
            begin += n

    def _rows(self, name: str, count: int) -> np.ndarray:
        """Fused rows of a sequence, by its name and their positions."""
        rng = np.random.default_rng([zlib.crc32(name.encode()), self.lengths[name]])
        width = 2 * MLA["qk_head_dim"] * HEADS if self.case.is_latent else 3 * HEADS * DIM
        return rng.standard_normal((count, width)).astype(self.dtype)

    def _attend(self, rows: np.ndarray, steps) -> np.ndarray:
        lists = {"positions": self._positions, "blocks": self._blocks}.get(self.case.lists)
        chosen = {} if lists is None else lists(steps)
        if self.case.is_latent:
            width = MLA["qk_head_dim"]
            self.cache.append_mla_kv(0, rows[:, :width])
            q = rows[:, width : width * (1 + HEADS)].reshape(-1, HEADS, width)
            return self.cache.cross_attention(0, q, 0.1, **chosen)[0].numpy()
        if self.case.lists == "budget":
            chosen = {"budget": 128}
        v_dim = self.case.config.get("v_head_dim")
        if v_dim:
            qkv = rows[:, : (HEADS + KV_HEADS) * DIM + KV_HEADS * v_dim]
        else:
            qkv = rows[:, : (HEADS + 2 * KV_HEADS) * DIM].reshape(-1, HEADS + 2 * KV_HEADS, DIM)
        return self.cache.attention(0, np.ascontiguousarray(qkv), **chosen).numpy()

    def _listed(self, steps, width: int, unit: int) -> np.ndarray:
        """Some positions, or blocks of positions, that each row sees; -1 behind them."""
        lists = []
        for name, n in steps:
            for position in range(self.lengths[name], self.lengths[name] + n):
                rng = np.random.default_rng([zlib.crc32(name.encode()), position])
                count = position // unit + 1
                found = rng.permutation(count)[:width]
                lists.append(np.pad(found, (0, width - len(found)), constant_values=-1))
        return np.array(lists, np.int32)

    def _positions(self, steps) -> dict:
        return {"positions": self._listed(steps, 300, 1)}

    def _blocks(self, steps) -> dict:
        return {"blocks": self._listed(steps, 20, 32), "block_size": 32}

    def result(self, name: str) -> np.ndarray:
        return np.concatenate(self.results[name])


def alone(case: Case, name: str) -> np.ndarray:
    """The results of a sequence that has a cache of its own."""
    world = World(case, case.create(1536))
    world.add(name)
    for n in SCRIPTS[name]:
        world.step((name, n))
    return world.result(name)


def dirty(world: World, rng) -> None:
    """Leave NaN in the pages of a cache, which are free again, in another order."""
    case, world.case = world.case, Case(world.case.config, world.case.layer)
    names = [f"dirty {i}" for i in range(6)]
    world.add(*names)
    plain = world._rows
    world._rows = lambda *each: np.full_like(plain(*each), np.nan)
    if case.lists != "budget":  # bounds of pages keep what was in them
        world.step(*((name, int(rng.integers(100, 300))) for name in names))
    for i in rng.permutation(len(names)):
        world.cache.remove_sequence(world.ids[names[i]])
    world.case, world._rows = case, plain


@pytest.mark.parametrize("name", all_slow_but(CASES, *OFTEN))
def test_bits_do_not_depend_on_the_batch(name, threads):
    case, rng = CASES[name], np.random.default_rng(0)
    threads.count = 1
    expected = {each: alone(case, each) for each in case.scripts}
    assert all(np.isfinite(each.astype(np.float32)).all() for each in expected.values())
    threads.count = 4
    again = alone(case, "long")
    assert again.tobytes() == expected["long"].tobytes(), "4 threads"

    # All sequences in each step, in turns in another order; prompts beside single rows.
    for count, capacity, delay in ((2, 2048, 0), (3, 4096, 1), (4, 3072, 2)):
        threads.count = count
        world = World(case, case.create(capacity))
        if delay:
            dirty(world, rng)
        if not case.mixes:
            delay = 0
        order = list(rng.permutation(case.scripts))
        world.add(*order)
        waiting = {each: i * delay for i, each in enumerate(order)}
        for step in range(5 + delay * (len(order) - 1)):
            names = [each for each in order if 0 <= step - waiting[each] < 5]
            rng.shuffle(names)
            if names:
                world.step(*((each, SCRIPTS[each][step - waiting[each]]) for each in names))
        for each, rows in expected.items():
            assert len(world.result(each)) == len(rows)
            differs = (world.result(each) != rows).any(axis=(1, 2)).nonzero()[0]
            assert world.result(each).tobytes() == rows.tobytes(), (
                f"{each}, {count} threads, delay {delay}: rows {differs[:5]} of {len(rows)}"
            )


@pytest.mark.parametrize("name", ["float32", "window"])
def test_bits_do_not_depend_on_the_trees_of_others(name, threads):
    """The only node of a tree attends as in decode, and a chain as a prompt does."""
    case, threads.count = CASES[name], 3

    def results(names: list[str], trees: dict[str, list[int]]) -> dict[str, bytes]:
        world = World(case, case.create(4096))
        world.add(*names)
        world.step(*((each, {"tree": 70, "chain": 310}.get(each, 700)) for each in names))
        steps = [(each, {"tree": 4, "chain": 3}.get(each, 1)) for each in names]
        rows = [world._rows(*each) for each in steps]
        parents = [parent for each in names for parent in trees.get(each, [])] or None
        ids = [world.ids[each] for each in names]
        with world.cache.forward(ids, [n for _, n in steps], parents):
            o = world._attend(np.concatenate(rows), steps)
        parts = np.split(o, np.cumsum([n for _, n in steps])[:-1])
        return {each: part.tobytes() for each, part in zip(names, parts, strict=True)}

    trees = {"tree": [-1, 0, 0, 1], "chain": [-1, 0, 1], "single": [-1]}
    together = results(["tree", "single", "chain"], trees)
    assert together["tree"] == results(["tree"], trees)["tree"]
    for each in ("single", "chain"):
        assert together[each] == results([each], {})[each], each
        assert together[each] == results([each], trees)[each], each


@pytest.mark.parametrize("name", ["float32", "mla"])
def test_forks_attend_as_alone_without_shared_reads(name, threads):
    case, threads.count = CASES[name], 2
    case = Case({**case.config, "share_prefix": False}, case.layer)

    def results(names: list[str]) -> dict[str, bytes]:
        world = World(case, case.create(4096))
        world.add("prompt")
        world.step(("prompt", 1200))
        for each in names:
            world.ids[each], world.lengths[each], world.results[each] = len(world.ids) + 50, 0, []
            world.cache.fork_sequence(world.ids["prompt"], world.ids[each])
        world.step(*((each, 1) for each in names))
        return {each: world.result(each).tobytes() for each in names}

    together = results(["a", "b", "c", "d"])
    assert all(together[each] == results([each])[each] for each in together)
