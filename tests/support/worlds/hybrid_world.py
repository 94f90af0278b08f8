# SPDX-License-Identifier: Apache-2.0
"""Hybrids under random operations, whose attention takes lists, blocks and budgets, over tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import tvm_pagedkv as pkv

from ...reference.listed import attention_by_heads, expand_blocks
from ...reference.page_bounds import bound_scores, choose_pages, page_bounds
from .recurrent_world import NUM_TOKENS, PAGE_SIZE, World

HEADS, DIM, LATENT_V_DIM, SCALE = 4, 16, 8, 0.25
LISTED, BOUNDED, LATENT = 5, 6, 7
WINDOW = 6  # of layer 3
BUDGET = 18  # four whole pages


def hybrid_config(config: pkv.KVCacheConfig) -> pkv.KVCacheConfig:
    """Add layers with lists, with bounds of pages, and latent ones with lists."""
    more = [pkv.LayerSpec(lists=True), pkv.LayerSpec(page_bounds=True, lists=True)]
    if not config.sliding_window:
        more.append(pkv.LayerSpec("mla", qk_head_dim=DIM, v_head_dim=LATENT_V_DIM, lists=True))
    return replace(
        config,
        num_layers=len(config.layers) + len(more),
        num_qo_heads=HEADS,
        num_kv_heads=2,
        kv_dtype=None,
        layers=[*config.layers, *more],
    )


class HybridWorld(World):
    """A `World` that compares attention, too: K and V of a row are those of its token.

    Parameters
    ----------
    seed, dtype, prefix_cache, options
        As for `World`.
    folder : path, optional
        Where sequences are saved and loaded, now and then.
    """

    def __init__(
        self,
        seed: int,
        dtype: str,
        prefix_cache: pkv.PrefixCacheConfig | None = None,
        folder: Path | None = None,
        **options,
    ):
        super().__init__(
            seed,
            dtype,
            prefix_cache,
            create=lambda config: pkv.create(hybrid_config(config)),
            **options,
        )
        self.config = hybrid_config(self.config)
        self.folder = folder
        self.hints: list[int] = []
        # Columns of different sizes let the pages of a text differ.
        width = self.rng.lognormal(size=DIM)
        shapes = {i: (NUM_TOKENS, HEADS + 4, DIM) for i in (0, 3, LISTED, BOUNDED)}
        shapes[LATENT] = (NUM_TOKENS, HEADS + 1, DIM)
        self.rows = {
            i: (self.rng.standard_normal(shape) * width).astype(dtype)
            for i, shape in shapes.items()
        }
        self.attention_tolerance = 1e-4 if dtype == "float32" else 3e-2

    def do(self) -> None:
        """Do something at random: with the sequences, with tiers, or with files."""
        chance = self.rng.random()
        if chance < 0.02 and self.folder is not None:
            self.reload()
        elif chance < 0.03:
            self.cache.forget_prefixes()
            self.count("forgotten")
        elif chance < 0.04:
            self.cache.clear()
            self.texts = {}
        elif chance < 0.06 and self.old:
            self.cache.prefetch(self.old[int(self.rng.integers(len(self.old)))])
            self.count("prefetches")
        elif chance < 0.08 and self.old:
            self.hint(self.old[int(self.rng.integers(len(self.old)))])
        elif chance < 0.12 and self.texts:
            self.record(int(self.rng.choice(list(self.texts))))
        else:
            super().do()

    def hint(self, tokens: list[int]) -> None:
        """Give a hint about a text, or end one."""
        what = int(self.rng.integers(4))
        if what == 0:
            self.hints.append(self.cache.retain(tokens, priority=int(self.rng.integers(1, 101))))
        elif what == 1:
            try:
                self.hints.append(self.cache.pin(tokens))
            except pkv.CacheFullError:
                self.count("refused pins")
        elif what == 2:
            self.cache.demote(tokens)
        while len(self.hints) > 3 or (what == 3 and self.hints):
            self.cache.release(self.hints.pop(0))
        self.cache.check_integrity()
        self.count("hints")

    def record(self, seq_id: int) -> None:
        """Tell tokens of a sequence that are not known yet, some or all."""
        text = self.texts[seq_id]
        if text.window or text.dropped:
            return
        rest = text.tokens[self.cache.num_recorded_tokens(seq_id) :]
        if not rest:
            return
        self.cache.record_tokens(seq_id, rest[: int(self.rng.integers(1, len(rest) + 1))])
        self.cache.check_integrity()
        self.count("records")

    def reload(self) -> None:
        """Write sequences to a file, and replace them by what the file has."""
        ids = [  # there are no files of sequences with a window or a tree
            i
            for i, text in self.texts.items()
            if not (text.nodes or text.window or text.dropped) and self.rng.integers(2)
        ]
        if not ids:
            return
        path = self.folder / "sequences"
        self.cache.save(path, ids, history=bool(self.rng.integers(2)))
        for seq_id in ids:
            self.cache.remove_sequence(seq_id)
        texts = {i: self.texts.pop(i) for i in ids}
        try:
            self.cache.load(path, ids)
        except pkv.CacheFullError:
            self.count("full")
            return
        self.texts |= texts
        for seq_id, text in texts.items():
            if self.rng.integers(2):
                self.cache.record_tokens(seq_id, text.tokens)
        self.cache.check_integrity()
        self.count("files")

    def run(self, lengths, rows, positions, parents, recorded) -> bool:
        """Run a step through all layers, compare its outputs, and return whether it was kept."""
        is_kept = bool(self.rng.integers(6))
        self.cache.begin_forward(list(lengths), list(lengths.values()), parents, recorded)
        is_decode = parents is None and len(rows) == len(lengths)
        has_windows = any(self.texts[i].window or self.texts[i].dropped for i in lengths)
        for i in self.rng.permutation(len(self.config.layers)):
            i = int(i)
            if i in self.layers:
                self.compare(i, self.layers[i].run(self.cache, i, rows), positions)
            elif not has_windows and parents is None:
                self.attend(i, rows, positions, is_decode)
            else:
                self.attend_whole(i, rows, None if has_windows else positions, parents)
        self.cache.end_forward() if is_kept else self.cache.abort_forward()
        self.count("steps" if is_kept else "aborts")
        return is_kept

    def compare(self, layer: int, outputs, positions) -> None:
        for row, (text, position) in enumerate(positions):
            for got, wanted in zip(outputs, self.wanted(layer, text), strict=True):
                found = got.numpy()[row].astype(np.float64)
                limit = self.tolerance * (1 + np.abs(wanted[position]))
                assert (np.abs(found - wanted[position]) < limit).all(), (layer, row, position)

    # --- attention ------------------------------------------------------------------------------

    def attend_whole(self, layer: int, rows: list[int], positions, parents=None) -> None:
        """Attend to all that a row sees; `positions` is None where that is not known here."""
        qkv = self.rows[layer][rows]
        if layer == LATENT:
            how = {}
            if positions is not None and parents is None:  # otherwise it sees earlier steps only
                owns = np.array([own for _, own in positions], np.int32)
                lists = np.tile(np.arange(owns.max() + 1, dtype=np.int32), (len(owns), 1))
                lists[lists > owns[:, None]] = -1
                how = {"positions": lists}
            o = self.attend_latent(layer, qkv, how)
        else:
            o = self.cache.attention(layer, qkv, SCALE).numpy()
        if positions is not None and not (layer == LATENT and parents is not None):
            first = (lambda own: max(0, own + 1 - WINDOW)) if layer == 3 else (lambda own: 0)
            lists = [[np.arange(first(own), own + 1)] for _, own in positions]
            self.compare_attention(layer, o, positions, lists)

    def attend(self, layer: int, rows: list[int], positions, is_decode: bool) -> None:
        """Attend to everything, to lists, to blocks or within a budget."""
        owns = [own for _, own in positions]
        kind = int(self.rng.integers(4))
        if layer in (0, 3) or kind == 0 or (kind == 3 and (layer != BOUNDED or not is_decode)):
            return self.attend_whole(layer, rows, positions)
        qkv = self.rows[layer][rows]
        if kind == 3:
            self.count("budgets")
            o = self.cache.attention(layer, qkv, SCALE, budget=BUDGET).numpy()
            return self.compare_attention(layer, o, positions, self.within_budget(qkv, positions))
        width = int(self.rng.integers(1, 12))
        if kind == 1 or layer == LATENT:
            self.count("lists")
            lists = np.array([self.rng.integers(-1, own + 1, width) for own in owns], np.int32)
            how, expanded = {"positions": lists}, lists[:, None]
        else:
            self.count("blocks")
            size, num_lists = PAGE_SIZE * int(self.rng.integers(1, 3)), int(self.rng.integers(1, 3))
            lists = np.full((len(rows), num_lists, width), -1, np.int32)
            for of_row, own in zip(lists, owns, strict=True):
                for listed in of_row:
                    some = self.rng.permutation(own // size + 1)[:width]
                    listed[: len(some)] = some
            how, expanded = {"blocks": lists, "block_size": size}, expand_blocks(lists, size, owns)
        if layer == LATENT:
            o = self.attend_latent(layer, qkv, how)
        else:
            o = self.cache.attention(layer, qkv, SCALE, **how).numpy()
        self.compare_attention(layer, o, positions, expanded)

    def attend_latent(self, layer: int, rows: np.ndarray, how: dict) -> np.ndarray:
        """Append the latent rows of a step, and attend to what `how` lists."""
        self.cache.append_mla_kv(layer, np.ascontiguousarray(rows[:, HEADS]))
        q = np.ascontiguousarray(rows[:, :HEADS])
        return self.cache.cross_attention(layer, q, SCALE, **how)[0].numpy()

    def within_budget(self, qkv: np.ndarray, positions) -> list[np.ndarray]:
        """Return the positions of each KV head that a budget leaves."""
        found = []
        for row, (text, own) in zip(qkv, positions, strict=True):
            k = self.rows[BOUNDED][text[: own + 1], HEADS : HEADS + 2].astype(np.float64)
            scores = bound_scores(row[:HEADS], *page_bounds(k, PAGE_SIZE))
            blocks = choose_pages(scores, BUDGET // PAGE_SIZE)
            found.append(expand_blocks(blocks[None], PAGE_SIZE, [own])[0])
        return found

    def compare_attention(self, layer: int, o: np.ndarray, positions, lists) -> None:
        """Compare with attention to ``lists[row][list]``, each for some of the KV heads."""
        for row, ((text, own), listed) in enumerate(zip(positions, lists, strict=True)):
            table = self.rows[layer][text[: own + 1]].astype(np.float64)
            q = table[own:, :HEADS]
            k = table[:, HEADS : HEADS + 2] if layer != LATENT else table[:, HEADS:]
            v = table[:, HEADS + 2 :] if layer != LATENT else k[..., :LATENT_V_DIM]
            want = attention_by_heads(q, k, v, np.array(listed)[None], [own], SCALE)[0][0]
            limit = self.attention_tolerance * (1 + np.abs(v).max())
            assert np.abs(o[row].astype(np.float64) - want).max() < limit, (layer, row, own)
