# SPDX-License-Identifier: Apache-2.0
"""Layers of a random step: each way to attend, with its expected result."""

from __future__ import annotations

import numpy as np

from ... import reference
from .random_shapes import NUM_QO_HEADS, is_latent
from .random_world import World


class Attention:
    """`attention`, perhaps with sinks, and perhaps again with the queries of another layer."""

    def __init__(self, world: World, layer: int, batch: list[int], lengths: list[int]):
        self.layer, self.batch, self.lengths = layer, batch, lengths
        num_rows, dim = sum(lengths), world.shapes.dim
        self.qkv = world.normal(num_rows, NUM_QO_HEADS + 2, dim)
        self.other_q = world.normal(num_rows, NUM_QO_HEADS, dim) if world.chance(0.2) else None
        self.sinks = world.normal(NUM_QO_HEADS) if world.chance(0.2) else None

    def rotated(self, world: World, positions: np.ndarray, q: np.ndarray):
        """q, k and v as a model passes them that rotates by itself where the pages want that."""
        k, v = self.qkv[:, NUM_QO_HEADS:-1], self.qkv[:, -1:]
        if world.modes[self.layer] == "normal":
            q, k = (reference.rotate(x, positions, world.rope).astype("f4") for x in (q, k))
        return q, k, v

    def run(self, world: World, positions: np.ndarray) -> None:
        """Call the cache; a second time does the same again."""
        cache, layer = world.cache, self.layer
        sinks = None if self.sinks is None else world.put(self.sinks)
        self.outputs = [cache.attention(layer, world.put(self.qkv), sink_logits=sinks)]
        if self.other_q is not None:
            qkv = map(world.put, self.rotated(world, positions, self.other_q))
            self.outputs.append(cache.attention_with_shared_kv(layer, *qkv, sink_logits=sinks))

    def check(self, world: World) -> None:
        """Append to the reference and compare."""
        local = world.local(self.layer)
        for i, out in enumerate(self.outputs):
            qkv = self.qkv.copy()
            if i == 1:  # the same K and V under other queries
                qkv[:, :NUM_QO_HEADS] = self.other_q
                for seq_id, num_rows in zip(self.batch, self.lengths, strict=True):
                    rows = world.mha.sequences[seq_id][local]
                    world.mha.sequences[seq_id][local] = tuple(x[:-num_rows] for x in rows)
            arguments = local, self.batch, self.lengths, qkv, 1, world.shapes.dim**-0.5, self.sinks
            want, _ = world.mha.attention(*arguments)
            what = f"{self.batch} {self.lengths} layer {self.layer}, {type(self).__name__} {i}"
            world.compare([out], [want], what)


class SplitAttention(Attention):
    """`self_attention`, `cross_attention` and their merge."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sinks = self.other_q = None

    def run(self, world: World, positions: np.ndarray) -> None:
        cache, layer = world.cache, self.layer
        q, k, v = map(world.put, self.rotated(world, positions, self.qkv[:, :NUM_QO_HEADS]))
        self.parts = cache.self_attention(layer, q, k, v), cache.cross_attention(layer, q)
        self.outputs = [cache.merge_attention(*self.parts[0], *self.parts[1])[0]]


class LatentAttention:
    """An MLA layer: absorbed attention to all, or to the past alone beside the step's own rows."""

    def __init__(
        self, world: World, layer: int, batch: list[int], lengths: list[int], is_whole: bool
    ):
        self.layer, self.batch, self.lengths, self.is_whole = layer, batch, lengths, is_whole
        num_rows, width = sum(lengths), world.shapes.latent_dim
        self.latent = world.normal(num_rows, width)
        self.q, self.k = world.normal(num_rows, 4, width), world.normal(num_rows, 4, 16)

    def run(self, world: World, positions: np.ndarray) -> None:
        cache, layer = world.cache, self.layer
        cache.append_mla_kv(layer, world.put(self.latent))
        if not self.is_whole:
            k, v = world.put(self.k), world.put(self.k[:, :, :8])
            self.own = cache.self_attention(layer, k, k, v, 0.3)
        self.outputs = cache.cross_attention(layer, world.put(self.q), 0.25)

    def check(self, world: World) -> None:
        local, what = world.local(self.layer), f"{self.batch} {self.lengths} layer {self.layer}"
        world.mla.append(local, self.batch, self.lengths, self.latent)
        arguments = local, self.batch, self.lengths, self.q, world.shapes.v_dim, 0.25
        wanted = world.mla.absorbed(*arguments, with_step=self.is_whole)
        world.compare(self.outputs, wanted, what)
        if self.is_whole:
            return
        parts, start = [], 0
        for seq_id, num_rows in zip(self.batch, self.lengths, strict=True):
            rows = slice(start, start + num_rows)
            start += num_rows
            total = world.mla.length(seq_id, local)
            window = world.mla.windows[local]
            mask = reference.tree_mask(world.tree(seq_id), num_rows, total, window)
            k = self.k[rows]
            parts.append(reference.attention(k, k, k[:, :, :8], mask[:, -num_rows:], 0.3))
        wanted = [np.concatenate(each) for each in zip(*parts, strict=True)]
        world.compare(self.own, wanted, f"{what}, its own rows")


def draw_layer(
    world: World, layer: int, batch: list[int], lengths: list[int], has_trees: bool
) -> Attention | LatentAttention:
    """One of the ways in which the layer can attend in such a step."""
    if is_latent(world.layers[layer]):
        can_be_whole = has_trees or max(lengths) == 1
        return LatentAttention(world, layer, batch, lengths, can_be_whole and world.chance(0.5))
    # Within a chunk that is longer than a window not all rows see each other.
    can_split = world.layers[layer] == 0 or world.layers[layer] >= max(lengths)
    # It sees the step's own rows before they are quantized, which the reference does not tell.
    can_split = can_split and not world.quantized
    for seq_id, num_rows in zip(batch, lengths, strict=True):
        window = world.window(seq_id)
        can_split = can_split and not (
            window.size and window.num_held < num_rows + window.sinks - 1
        )
    kind = SplitAttention if can_split and world.chance(0.35) else Attention
    return kind(world, layer, batch, lengths)
