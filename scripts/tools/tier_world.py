# SPDX-License-Identifier: Apache-2.0
"""A cache in use at random, for prove_tiers.py: all pages that it gives are compared.

A row of K, V or a latent is a function of the model, the salt, the layer and the tokens up to its
position, so the right content of each slot is known without a reference run. Kernels in NumPy write
such rows; attention itself is not computed.
"""

from __future__ import annotations

import ctypes
import random
import zlib

import numpy as np
import tvm
from tier_faults import Clock
from tier_states import HEAD_DIM, RECURRENT, RecurrentLayer, states_of

import tvm_pagedkv as pkv
from tvm_pagedkv.stores import PageStore, close_worker

PAGE_SIZE, CHUNK, MAX_SEQUENCES = 4, 32, 4
NUM_TEXTS, TEXT_LENGTH, VOCABULARY = 12, 48, 3
POISON = np.float32(-1.0)  # right rows are not negative

MHA = {"kind": "mha", "num_qo_heads": 1, "num_kv_heads": 1, "qk_head_dim": 8}
LAYOUTS = {
    "full": (MHA, MHA),
    "mixed": (
        MHA,
        {**MHA, "kind": "mha_sliding", "window": 6},
        {"kind": "mla", "num_qo_heads": 1, "qk_head_dim": 16, "v_head_dim": 8},
    ),
    "hybrid": (RECURRENT, MHA),
    "hybrid with few ingredients": ({**RECURRENT, "history_tokens": 8}, MHA),
}
_LAYER_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)


def _view(tensor: tvm.runtime.Tensor) -> np.ndarray:
    return np.from_dlpack(tensor)


class World:
    """A cache with tiers, and the texts of its sequences.

    Parameters
    ----------
    draw : random.Random
        Decides everything that the world does.
    store : PageStore
        Belongs to the cache.
    clock : Clock
    counts : object
        Its ``add(name, count=1)`` counts.
    lies : bool
        Whether the rows are those of another model than the cache's keys say.
    """

    def __init__(
        self, draw: random.Random, store: PageStore, clock: Clock, counts, lies: bool = False
    ) -> None:
        self._draw, self._clock, self._counts = draw, clock, counts
        self._layout = draw.choice(list(LAYOUTS))
        self._layers = LAYOUTS[self._layout]
        self._model = draw.choice(("one", "two"))
        # How much history a cache keeps is not in its keys: another cache may find its pages.
        values = [{**layer, "history_tokens": None} for layer in self._layers]
        self._rows_name = f"{values} {self._model} {lies}".encode()
        self._pages: dict[int, np.ndarray] = {}
        self._tokens: dict[int, list[int]] = {}
        self._salts: dict[int, bytes] = {}
        self._before: dict[str, int] = {}
        self._is_damaged = False
        self._recurrent = RecurrentLayer()
        config = {
            "max_num_sequences": MAX_SEQUENCES,
            "max_total_tokens": 28 * PAGE_SIZE,
            "prefill_chunk_size": CHUNK,
            "page_size": PAGE_SIZE,
            "dtype": "float32",
            "rope_mode": 1,
            "layers": self._layers,
        }
        create = tvm.get_global_func("pagedkv.create")
        self._cache = create(config, self._kernels(), tvm.cpu())
        description = self._cache.description
        self._groups = {layer["id"]: layer["group"] for layer in description["layers"]}
        tiers = pkv.PrefixCacheConfig(
            host_bytes=draw.choice((12_000, 40_000)),
            store=store,
            model_id=self._model,
            write_policy=draw.choice(("back", "through", "selective")),
            lookup_timeout=draw.choice((0.0, 0.005)),
        )
        self._find_pages()
        pkv.open_prefix_cache(self._cache, tiers)
        self._tier = tvm.get_global_func("pagedkv.prefix_tier")(self._cache)

    def step(self) -> None:
        """Do one thing at random and compare what it leaves."""
        draw = self._draw.random()
        seq_id = self._draw.choice(list(self._tokens)) if self._tokens else None
        if draw < 0.01:
            self._clock.jump(self._draw)
            self._counts.add("jumps")
        elif draw < 0.015:
            self._damage_host_memory()
        elif draw < 0.03:
            self._cache.prefetch(*self._prompt())
        elif draw < 0.031:
            self._forget()
        elif draw < 0.035:
            self._cache.flush_prefixes(0.05)
        elif seq_id is None or (draw < 0.35 and len(self._tokens) < MAX_SEQUENCES):
            seq_id = self._add()
        elif draw < 0.55:
            self._remove(seq_id)
        elif draw < 0.6:
            self._pop(seq_id)
        elif draw < 0.63 and len(self._tokens) < MAX_SEQUENCES:
            seq_id = self._fork(seq_id)
        else:
            self._append(seq_id, is_aborted=draw < 0.66)
        if seq_id in self._tokens:
            self._check(seq_id)
        if draw < 0.1:
            if not self._is_damaged:  # it would say so
                self._cache.check_integrity()
            self._count_tiers()

    def end(self, seconds: float) -> None:
        """Write what is pending and close the store.

        Raises
        ------
        RuntimeError
            If that takes longer.
        """
        self._count_tiers()
        self._cache.flush_prefixes(0.0)
        if not close_worker(self._tier, seconds):
            raise RuntimeError(f"the store has not closed within {seconds} s")

    def _prompt(self) -> tuple[list[int], bytes]:
        text = random.Random(self._draw.randrange(NUM_TEXTS))
        tokens = [text.randrange(VOCABULARY) for _ in range(TEXT_LENGTH)]
        tokens = tokens[: self._draw.randint(1, TEXT_LENGTH)]
        tokens += self._draw.choices(range(VOCABULARY), k=self._draw.randrange(3))
        return tokens, self._draw.choice((b"", b"", b"a"))

    def _add(self) -> int:
        seq_id = min(set(range(MAX_SEQUENCES)) - set(self._tokens))
        tokens, salt = self._prompt()
        wait = self._draw.choice((None, 0.0, 0.2))
        try:
            reused = self._cache.add_sequence(seq_id, tokens, salt, wait)
        except pkv.CacheFullError:
            self._counts.add("full")
            return -1
        if not 0 <= reused < len(tokens):
            raise RuntimeError(f"{reused} of {len(tokens)} positions were reused")
        self._counts.add("lookups")
        self._tokens[seq_id], self._salts[seq_id] = tokens[:reused], salt
        self._check(seq_id)
        for begin in range(reused, len(tokens), CHUNK):
            if not self._extend(seq_id, tokens[begin : begin + CHUNK]):
                break
        return seq_id

    def _append(self, seq_id: int, is_aborted: bool) -> None:
        tokens = self._draw.choices(range(VOCABULARY), k=self._draw.choice((1, 1, 9)))
        if not is_aborted:
            self._extend(seq_id, tokens)
            return
        try:
            self._cache.begin_forward([seq_id], [len(tokens)], tokens=tokens)
        except pkv.CacheFullError:
            return
        if self._layers[0] is MHA:
            self._cache.attention(0, np.full((len(tokens), 3, 8), POISON))
        else:
            self._recurrent.run(self._cache, 0, np.zeros((len(tokens), 16), "float32"))
        self._cache.abort_forward()

    def _extend(self, seq_id: int, tokens: list[int]) -> bool:
        """Append rows of tokens in a step; False where the cache is full."""
        try:
            self._cache.begin_forward([seq_id], [len(tokens)], tokens=tokens)
        except pkv.CacheFullError:
            self._counts.add("full")
            self._remove(max(self._tokens, key=lambda each: len(self._tokens[each])))
            return False
        self._tokens[seq_id] += tokens
        hashes = self._hashes(seq_id)[-len(tokens) :]
        for layer, each in enumerate(self._layers):
            if each["kind"] == "mla":
                self._cache.append_mla_kv(layer, self._rows(hashes, layer))
                continue
            if each["kind"] == "recurrent":
                self._run_recurrence(seq_id, layer, len(tokens))
                continue
            qkv = np.zeros((len(tokens), 3, 8), "float32")
            qkv[:, 1:] = self._rows(hashes, layer).reshape(-1, 2, 8)
            self._cache.attention(layer, qkv)
        self._cache.end_forward()
        return True

    def _run_recurrence(self, seq_id: int, layer: int, count: int) -> None:
        """Append rows to a recurrent layer, and compare what it makes of them."""
        rows = self._rows(self._hashes(seq_id), layer)
        convolved, states = (each[-count:] for each in states_of(rows))
        found, o = self._recurrent.run(self._cache, layer, rows[-count:])
        if not (np.array_equal(found, convolved) and np.array_equal(o, states[:, :HEAD_DIM])):
            raise RuntimeError(
                f"the states of a {self._layout} cache are wrong behind the last {count} of "
                f"{self._tokens[seq_id]}, salt {self._salts[seq_id]}"
            )

    def _remove(self, seq_id: int) -> None:
        self._cache.remove_sequence(seq_id)
        del self._tokens[seq_id], self._salts[seq_id]

    def _pop(self, seq_id: int) -> None:
        count = min(self._draw.randrange(8), len(self._tokens[seq_id]))
        try:
            self._cache.pop_n(seq_id, count)
        except ValueError:  # beyond a window
            return
        del self._tokens[seq_id][len(self._tokens[seq_id]) - count :]

    def _fork(self, parent: int) -> int:
        child = min(set(range(MAX_SEQUENCES)) - set(self._tokens))
        length = max(0, len(self._tokens[parent]) - self._draw.randrange(6))
        try:
            self._cache.fork_sequence(parent, child, length)
        except ValueError:
            return parent
        self._tokens[child] = self._tokens[parent][:length]
        self._salts[child] = self._salts[parent]
        return child

    def _forget(self) -> None:
        """Forget all texts, then tell those of the sequences again."""
        self._cache.forget_prefixes()
        for seq_id in list(self._tokens):
            if self._salts[seq_id]:  # a text without a lookup has no salt
                self._remove(seq_id)
            else:
                self._cache.record_tokens(seq_id, self._tokens[seq_id])

    def _damage_host_memory(self) -> None:
        """Flip bits of the tier's memory, as bad hardware does."""
        address, size = tvm.get_global_func("pagedkv.tier_memory")(self._tier)
        for _ in range(self._draw.choice((1, 30))):
            at = address + self._draw.randrange(size)
            byte = ctypes.string_at(at, 1)[0] ^ 1 << self._draw.randrange(8)
            ctypes.memset(at, byte, 1)
        self._is_damaged = True
        self._counts.add("host_damages")

    def _check(self, seq_id: int) -> None:
        """Compare all rows of a sequence that the cache keeps.

        Raises
        ------
        RuntimeError
            If one is wrong.
        """
        length = self._cache.sequence_length(seq_id)
        if length != len(self._tokens[seq_id]):
            raise RuntimeError(f"sequence {seq_id} has {length} positions")
        hashes = self._hashes(seq_id)
        for layer, each in enumerate(self._layers):
            if each["kind"] == "recurrent":
                rows = self._rows(hashes, layer)
                states = states_of(rows)[1]
                num_pages = self._recurrent.check(self._cache, seq_id, rows, states)
                self._counts.add("checked_pages", num_pages)
                continue
            group = self._groups[layer]
            first = self._cache.first_position(seq_id, group)
            table = self._cache.page_table(seq_id, group)
            pages = self._pages[layer][table]
            width = pages.shape[-1]
            rows = pages.reshape(len(table), 16 // width, PAGE_SIZE, width).swapaxes(1, 2)
            rows = rows.reshape(len(table) * PAGE_SIZE, 16)[: length - first]
            expected = self._rows(hashes[first:], layer)
            if not np.array_equal(rows, expected):
                wrong = first + np.flatnonzero((rows != expected).any(axis=1))
                raise RuntimeError(
                    f"layer {layer} of a {self._layout} cache has wrong rows at positions "
                    f"{wrong.tolist()} of {self._tokens[seq_id]}, salt {self._salts[seq_id]}"
                )
            self._counts.add("checked_pages", len(table))

    def _hashes(self, seq_id: int) -> np.ndarray:
        """A number for each position that depends on all tokens up to it, uint32 [length]."""
        state = zlib.crc32(self._salts[seq_id], zlib.crc32(self._rows_name))
        states = []
        for token in self._tokens[seq_id]:
            state = ((state ^ (token + 1)) * 0x9E3779B1 ^ state >> 15) & 0xFFFFFFFF
            states.append(state)
        return np.array(states, np.uint32)

    def _rows(self, hashes: np.ndarray, layer: int) -> np.ndarray:
        """The 16 numbers of a slot of a layer: K and V, or the latent; float32 [rows, 16]."""
        mixed = hashes[:, None] * _LAYER_FACTORS[layer] + np.arange(16, dtype=np.uint32) * 40503
        return ((mixed ^ mixed >> 16) & 0xFFFFFF).astype("float32")  # exact

    def _count_tiers(self) -> None:
        stats = self._cache.stats()["prefix_tiers"]
        names = {f"{tier}_tokens": f"reused_{tier}_tokens" for tier in ("pool", "host", "store")}
        names["damaged_values"] = "num_damaged_pages"
        for name, key in names.items():
            self._counts.add(name, stats[key] - self._before.get(key, 0))
        self._before = stats

    def _find_pages(self) -> None:
        """Let each layer append once, for the kernels to see its pages."""
        self._cache.add_sequence(0)
        self._cache.begin_forward([0], [1])
        for layer, each in enumerate(self._layers):
            self._layer = layer
            if each["kind"] == "mla":
                self._cache.append_mla_kv(layer, np.zeros((1, 16), "float32"))
            elif each["kind"] == "recurrent":
                self._recurrent.run(self._cache, layer, np.zeros((1, 16), "float32"))
            else:
                self._cache.attention(layer, np.zeros((1, 3, 8), "float32"))
        self._cache.end_forward()
        self._cache.remove_sequence(0)
        recurrent = self._recurrent
        others = (recurrent.ingredients, recurrent.states, recurrent.inputs)
        for pages in (*self._pages.values(), *others):
            pages[...] = POISON

    def _kernels(self) -> dict:
        def nothing(*_):
            pass

        def rope_append(qkv, _indptr, _positions, slots, _q, pages, _rotates):
            pages, slots = _view(pages), _view(slots)
            self._pages.setdefault(self._layer, pages)
            rows = _view(qkv)[:, 1:]
            for row, slot in zip(rows, slots, strict=True):
                if slot >= 0:
                    pages[slot // PAGE_SIZE, :, 0, slot % PAGE_SIZE] = row

        def append_mla(pages, kv, slots):
            pages, slots = _view(pages), _view(slots)
            self._pages.setdefault(self._layer, pages)
            flat = pages.reshape(-1, pages.shape[2])
            flat[slots[slots >= 0]] = _view(kv)[slots >= 0]

        def copy_single_page(pages, source, destination, length):
            pages = _view(pages)
            pages[destination, ..., :length, :] = pages[source, ..., :length, :]

        others = ("prefill", "decode", "prefill_sliding", "decode_sliding", "merge", "mla_prefill",
                  "prefill_ragged")  # fmt: skip
        kernels = dict.fromkeys(others, nothing)
        kernels |= {
            "rope_append": rope_append,
            "transpose_append_mla": append_mla,
            "copy_single_page": copy_single_page,
        }
        converted = {name: tvm.runtime.convert(kernel) for name, kernel in kernels.items()}
        return converted | self._recurrent.kernels()
