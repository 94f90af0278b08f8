# SPDX-License-Identifier: Apache-2.0
"""Attention with tiles of query rows whose positions are split as well.

A tile is some tokens with the heads of a KV head: K and V are packed once for all of them. Since
its positions are split among tasks, few tiles over a long context use every thread. Those that
several tasks attend to leave partial states, which are merged in the same call.
"""

from collections.abc import Callable

from tvm.script import tirx as T

from ...layout import arrays_of
from ...script import inline
from ...signatures.inputs import PagedInputs
from ...spec import LOG2E, KernelSpec
from ..pages.kv_rows import LatentRows, PagedRows
from ..softmax.output import Output, PartialStates, finish
from ..tasks import TASKS
from ..tiles.amx_products import products_of
from ..tiles.kv_tile import POSITIONS
from ..tiles.lane_kv import LaneKv
from ..tiles.lane_rows import LaneMask, LaneQueries, LaneView, RowBlocks
from ..tiles.lane_softmax import LaneSoftmax
from ..tiles.query_tile import tile_tokens
from ..tiles.tile_splits import CutTile, Split, TileSlots, TileSplits


@inline
def attend(
    spec: KernelSpec,
    a: PagedInputs,
    ops,
    tiles: type,
    make_mask: Callable,
    merges: bool,
    kind: type | None = None,
):
    """Attend with all tiles, and store.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With views of the pages, and `rope`.
    ops : operands object
    tiles : type
        Iterates over the tiles: `SequenceTiles` or `SegmentTiles`.
    make_mask : callable
        Returns the mask of a task, or None where rows see all positions of their tile.
    merges : bool
        Whether results are merged with those that `o` and `lse` hold.
    kind : type, optional
        Where K and V are. None: in pages in the order of positions.
    """
    max_rows = T.meta_var(tile_tokens(spec) * spec.group_size)
    splits = TileSplits(POSITIONS * spec.group_size * (spec.qk_head_dim + spec.v_head_dim))
    all_tiles = tiles(spec, a)
    splits.plan(all_tiles)
    slots = TileSlots(splits)
    slots.begin(all_tiles)
    states = PartialStates(spec, slots.num_tile_slots, max_rows)
    ops.begin([a.q, *arrays_of(a.pages)])
    with ops.scope():
        for task in T.parallel(splits.num_tasks, annotations=TASKS):
            tile, split = tiles(spec, a), Split(splits)
            table = T.meta_var((a.page_ids, tile.first_page, tile.last_page))
            paged = T.meta_var(LatentRows if spec.is_latent else PagedRows)
            rows = T.meta_var((kind or paged)(spec, a.pages, *table, head=tile.head))
            factor = a.sm_scale * T.float32(LOG2E)
            ops.begin_task()
            a.rope.begin_task()
            a.rope.begin_sequence(T.int32(0))  # the length matters to longrope only
            mask = T.meta_var(make_mask())
            q = LaneQueries(spec, ops, max_rows, a, a.rope, factor)
            kv = LaneKv(spec, ops, rows)
            products, softmax = products_of(spec, ops), LaneSoftmax(spec, ops, max_rows)
            o = products.sums(spec, ops, max_rows)
            blocks, output = RowBlocks(spec, ops), Output(spec, a, merges=merges)
            if mask is not None:
                seen = LaneMask(mask, max_rows, ops.lanes)

            @inline
            def attend_to_all(block, first):
                num_seen = T.min(POSITIONS, tile.end - first)
                view = T.meta_var(LaneView(block, first, num_seen, tile.k_offset))
                scores = T.meta_var(products.qk(q, kv, view))  # S^T = K Q^T
                scores.hide_rest()
                weights = T.meta_var(softmax.update(scores))  # P = exp2(S - maximum)
                products.pv(o, weights, kv)  # O = O * rescale + P V

            @inline
            def attend_to_seen(block, first):
                last_row = T.min(block.end_row, tile.num_rows) - 1
                num_seen = T.min(POSITIONS, tile.end_of(last_row) - first)
                if num_seen > 0:
                    num_shared = T.max(mask.shared_end(tile.end_of(block.first_row)) - first, 0)
                    if mask.has_window:  # later rows may not see the first positions
                        if first < seen.last_begin(tile, last_row):
                            num_shared = 0
                    view = T.meta_var(LaneView(block, first, num_seen, tile.k_offset))
                    scores = T.meta_var(products.qk(q, kv, view))  # S^T = K Q^T
                    if num_shared < POSITIONS:
                        scores.hide(num_shared, seen)
                    weights = T.meta_var(softmax.update(scores))  # P = exp2(S - maximum)
                    if num_shared < kv.rounded(num_seen) and kv.has_non_finite != 0:
                        products.pv_seen(o, weights, kv, seen)
                    else:
                        products.pv(o, weights, kv)  # O = O * rescale + P V

            attend_to = T.meta_var(attend_to_all if mask is None else attend_to_seen)
            q.begin_task()
            kv.begin_task()
            split.take(task)
            tile.begin()
            while tile.before < split.last:
                split.enter(tile)
                if split.num_segments > 0:
                    if mask is not None:
                        mask.begin_sequence(tile.sequence, tile.kv_len)
                    blocks.begin(tile.num_rows)
                    for vector in range(blocks.num_vectors):
                        q.load(vector, tile)
                        if mask is not None:
                            seen.load(vector, tile)
                    for segment in range(split.num_segments):
                        for vector in range(blocks.num_vectors):
                            softmax.reset(vector)
                            o.clear(vector)
                        for i in range(split.begin_of(segment), split.begin_of(segment + 1)):
                            first = (tile.first_kv_tile + i) * POSITIONS
                            if mask is not None:
                                mask.begin_tile(first, a.rope)
                            kv.pack(first, tile.end, a.rope, tile.k_offset)
                            if mask is not None:
                                num_shared = mask.shared_end(tile.end_of(0)) - first
                                if mask.has_window:
                                    if first < seen.last_begin(tile, tile.num_rows - 1):
                                        num_shared = 0
                                kv.find_non_finite(num_shared, tile.end - first)
                            for index in range(blocks.count):
                                if index < blocks.num_wide:
                                    attend_to(blocks.wide(index), first)
                                else:
                                    attend_to(blocks.narrow(index), first)
                        o.transpose(blocks.num_vectors)
                        if T.Not(split.is_only):
                            for row in range(tile.num_rows):
                                state = T.meta_var(o.state(row, softmax))
                                if split.begin > 0:
                                    own = T.meta_var(slots.first(task) + 1 + segment)
                                    states.put(states.at(own, row), *state)
                                elif segment == 0:
                                    states.put(states.at(slots.first(task), row), *state)
                                else:
                                    states.add(states.at(slots.first(task), row), *state)
                    if split.is_whole:
                        for row in range(tile.num_rows):
                            at = T.meta_var((tile.token(row), tile.query_head(row)))
                            if split.is_only:
                                finish(a.rope, output, *at, *o.state(row, softmax))
                            else:
                                merged = T.meta_var(states.at(slots.first(task), row))
                                finish(a.rope, output, *at, *states.result(merged))
                tile.advance()
            ops.end_task()
    if splits.num_tasks > 1:
        for task in T.parallel(splits.num_tasks, annotations=TASKS):
            tile, output = tiles(spec, a), Output(spec, a, merges=merges)
            cut_tile = CutTile(splits, slots)
            cut_tile.merge(task, tile, states, a.rope, output)
    states.free()
    slots.free()
