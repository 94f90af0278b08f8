# SPDX-License-Identifier: Apache-2.0
"""Checks of caches on a GPU beside their references: every kernel, and random calls."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import tvm
from gpu_check_configs import RECURRENT_OPTIONS
from gpu_check_pair import POPPABLE, Kernels, Pair

import tvm_pagedkv as pkv
from tests import reference
from tests.reference import quantized
from tests.support.emulators.python_kernels import share_every_prefix
from tests.support.worlds import recurrent_world


def check_forwards(kernels: Kernels, size: int, seed: int = 0) -> str:
    """A prefill, decode, forks, pops, trees and their commits, windows; `size` is of a prompt."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.resolved().layers[0].rope.mode, seed)
    for seq_id in range(3):
        pair.add(seq_id)
    pair.step({0: size, 1: size // 2 + 1})
    for _ in range(config.page_size + 1):  # over a boundary of pages
        pair.step({0: 1, 1: 1})
    pair.step({2: 5, 0: 1, 1: size // 3})
    pair.fork(0, 3, 3)
    pair.fork(3, 4, 0)
    pair.step({3: 1, 0: 1, 4: 1})
    pair.pop(1, 5)
    for _ in range(2):  # the second time with what the first has left
        pair.step({0: [-1, 0, 0, 1, 2], 3: [-1, -1, 0], 1: [-1]})
        pair.commit({0: 4, 3: 1, 1: -1})
    pair.step({0: [-1, 0, 0, 1], 4: [-1, 0, 0]})
    pair.step({4: [1], 0: [2, 3]})
    pair.commit({0: 5, 4: 2})
    pair.check_rows()
    if config.sliding_window:
        pair.enable_window(1, size // 4 + 3, 2)
        pair.enable_window(2, 4, 1)
        for rows in ({1: 1, 2: 1, 0: 1}, {2: 7, 1: size // 2, 0: 3}, {1: 1, 2: 1}):
            pair.step(rows)
    check_saved(kernels, pair)
    return f"{len(pair.ids)} sequences, {pair.cache.total_length()} positions"


def check_saved(kernels: Kernels, pair: Pair) -> None:
    """Check that what is saved and loaded has the same bits."""
    ids = sorted(set(pair.ids) - pair.windowed)
    other = kernels.create()
    with tempfile.TemporaryDirectory() as folder:
        pair.cache.save(Path(folder) / "kv.safetensors", ids)
        other.load(Path(folder) / "kv.safetensors")
    for seq_id in ids:
        groups = range(len(other.stats()["groups"]))
        begin = max(pair.cache.first_position(seq_id, group) for group in groups)
        for cache_rows in zip(
            pair.cache.debug_get_kv(seq_id, begin), other.debug_get_kv(seq_id, begin), strict=True
        ):
            reference.assert_same_bits(*(rows.numpy() for rows in cache_rows), what="a checkpoint")


def check_parts(kernels: Kernels, size: int, seed: int = 1) -> str:
    """Self and cross attention, merged; and the halves of what a step does in one pass."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(mode="none"), config, "none", seed)
    pair.add(0)
    pair.add(1)
    for rows in ({0: size, 1: 3}, {0: 1, 1: size // 2}, {1: 1, 0: 1}):
        pair.step(rows, in_parts=True)
    pair.step({0: [-1, 0, 0], 1: [-1, 0, 1, 0]}, in_parts=True)
    pair.commit({0: 1, 1: 3})
    pair.check_rows()
    for mode in ("normal", "none"):
        if mode == "normal" and (config.sliding_window or pair.codec):
            continue
        halves = Pair(kernels.create(mode, without="rope_append"), config, mode, seed)
        halves.add(0)
        halves.step({0: size // 2})
        halves.step({0: 1})
        halves.check_rows()
    return f"{pair.cache.total_length()} positions"


def check_shared_prefix(kernels: Kernels, size: int, seed: int = 2) -> str:
    """Sequences over one prefix, which is read once where there are kernels for that."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.resolved().layers[0].rope.mode, seed)
    share_every_prefix(pair.cache)
    pair.add(0)
    pair.step({0: size})
    for child in range(1, 6):
        pair.fork(0 if child < 4 else 2, child, 0)
        pair.step({child: child})
    for rows in (dict.fromkeys(range(6), 1), {i: 1 + i for i in range(6)}, {1: 1, 2: 1}):
        pair.step(rows)
    stats = pair.cache.stats()
    return f"{stats['pages_read']} pages read of {stats['pages_read_without_sharing']}"


def check_random(kernels: Kernels, size: int, seconds: float, min_calls: int, seed: int = 3) -> str:
    """Random calls, for some seconds but at least `min_calls` of them."""
    config = kernels.bundle.config
    pair = Pair(kernels.create(), config, config.resolved().layers[0].rope.mode, seed)
    rng, counts, end, next_id = pair.rng, Counter(), time.perf_counter() + seconds, 0
    room = config.max_total_tokens // 2
    while time.perf_counter() < end or counts.total() < min_calls:
        ids = pair.ids
        plain = [i for i in ids if i not in pair.windowed and pair.slack[i] == 0]
        plain = [i for i in plain if pair.mha.length(i) > POPPABLE]
        choices = ["step", "step", "decode"] if ids else []
        choices += ["add"] if len(ids) < config.max_num_sequences else []
        choices += ["remove"] if len(ids) > 3 else []
        choices += ["pop", "tree"] if plain else []
        choices += ["fork"] if plain and "add" in choices else []
        choices += ["window"] if plain and config.sliding_window else []
        if pair.cache.total_length() > room:
            choices = ["remove"]
        what = choices[rng.integers(len(choices))]
        some = ids[rng.integers(len(ids))] if ids else None
        one = plain[rng.integers(len(plain))] if plain else None
        if what == "add":
            pair.add(next_id)
        elif what == "fork":
            pair.fork(one, next_id, int(rng.integers(POPPABLE)))
        elif what == "remove":
            pair.remove(some)
        elif what == "pop":
            pair.pop(one, int(rng.integers(1, POPPABLE)))
        elif what == "window":
            pair.enable_window(one, int(rng.integers(6, size)), int(rng.integers(5)))
        elif what == "tree":
            num_nodes = int(rng.integers(1, 12))
            pair.step({one: [int(rng.integers(-1, i)) for i in range(num_nodes)]})
            pair.commit({one: int(rng.integers(-1, num_nodes))})
        else:
            batch = rng.permutation(ids)[: rng.integers(1, len(ids) + 1)].tolist()
            longest = max(2, size // len(batch))
            pair.step({i: 1 if what == "decode" else int(rng.integers(1, longest)) for i in batch})
        next_id += what in ("add", "fork")
        counts[what] += 1
        if counts.total() % 10 == 0:
            pair.check_rows()
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))


def check_recurrent(
    kernels: Kernels, seconds: float, min_calls: int, is_tiny: bool, seed: int = 5
) -> str:
    """Random calls on a cache with recurrent layers, beside its texts in float64."""
    end = time.perf_counter() + seconds
    world = recurrent_world.World(
        seed, create=lambda _: kernels.create(), is_wide=not is_tiny, **RECURRENT_OPTIONS
    )
    while time.perf_counter() < end or sum(world.counts.values()) < min_calls:
        world.do()
    for name in ("recurrent_append", "recurrent_scan", "row_append", "causal_conv"):
        assert any(kernel == name for _, kernel in kernels.calls), f"{name} was not called"
    return ", ".join(f"{n} {what}" for what, n in sorted(world.counts.items()))


def check_the_rest(kernels: Kernels) -> str:
    """Kernels that caches have not called: those that can be are called here.

    Raises
    ------
    AssertionError
        For a wrong result, and when one was called nowhere.
    """
    config, rng = kernels.bundle.config, np.random.default_rng(4)
    page, left = config.page_size, kernels.never_called()
    sets = [layer["kernel_set"] for layer in kernels.bundle.cache_map()["layers"]]

    def tensor(array):
        return tvm.runtime.tensor(array, device=kernels.device)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(config.dtype)

    slots = rng.permutation(7 * page)[:9].astype(np.int32)
    layers, unknown = config.resolved().layers, []
    for index, name in left:
        layer, function = layers[sets.index(index)], kernels.bundle.kernel_sets[index][name]
        heads = layer.num_kv_heads, layer.qk_head_dim
        if name == "merge":
            width = layer.mla_original_v_head_dim or layer.v_head_dim
            states = [normal(9, layer.num_qo_heads, width) for _ in range(2)]
            lses = [rng.standard_normal(states[0].shape[:2], np.float32) for _ in range(2)]
            expected = reference.merge(states[0], lses[0], states[1], lses[1])
            first = tensor(states[0]), tensor(lses[0])
            function(*first, tensor(states[1]), tensor(lses[1]))
            reference.assert_close(first[0].numpy(), expected[0], config.dtype, "merge")
            reference.assert_lse_close(first[1].numpy(), expected[1], config.dtype, "lse of merge")
        elif name == "copy_single_page":  # in place of `copy_pages`, where that is missing
            rows = (page,) if layer.kind == "mla" else (2, heads[0], page)
            if layer.codec:
                shape = 7, layer.page_bytes(page)
                pages = rng.integers(0, 256, shape, dtype=np.uint8)
                parts = quantized.page_parts(layer.codec, pages, rows, heads[1], layer.v_head_dim)
                parts = [part.view(np.uint8) for part in parts]
            else:
                pages = normal(7, *rows, heads[1])
                parts = [pages]
            copied = tensor(pages)
            function(copied, 5, 2, page - 1)
            for part in parts:
                part[2, ..., : page - 1, :] = part[5, ..., : page - 1, :]
            reference.assert_same_bits(copied.numpy(), pages, name)
        elif name == "debug_get_kv":
            pages = normal(7, 2, heads[0], page, heads[1])
            out = [tensor(np.zeros((2, 9, *heads), config.dtype)) for _ in range(2)]
            function(tensor(pages), tensor(slots), *out, 1)
            for got, want in zip(out, reference.gather_slots(pages, slots), strict=True):
                reference.assert_same_bits(got.numpy()[1], want, name)
        elif name == "debug_get_kv_mla":
            pages, out = normal(7, page, heads[1]), np.zeros((2, 9, heads[1]), config.dtype)
            out = tensor(out)
            function(tensor(pages), tensor(slots), out, 1)
            reference.assert_same_bits(out.numpy()[1], pages.reshape(-1, heads[1])[slots], name)
        else:
            unknown.append(f"{name} of set {index}")
    assert not unknown, f"called by nothing: {', '.join(unknown)}"
    called = sum(map(len, kernels.bundle.kernel_sets))
    return f"{called} kernels, {len(left)} of them called by no cache"


def load(folder: Path, device) -> Kernels:
    """A bundle's kernels for a device."""
    return Kernels(pkv.load_bundle(folder, device=device), device)


def with_sharing(kernels: Kernels) -> bool:
    """Whether the bundle has kernels that read shared prefixes once."""
    return any("shared" in name for each in kernels.bundle.kernel_sets for name in each)
