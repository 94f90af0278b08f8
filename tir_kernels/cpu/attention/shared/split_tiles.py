# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows whose positions are cut among tasks.

Every task takes one split, which is as much of all (tile, position) work as any other, so that one
tile with many positions uses every thread. A tile that falls into one split is finished there; one
that is cut leaves partial states, which are merged in the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ....signatures.inputs import AttentionInputs
from ....spec import KernelSpec
from ...components.output import Output
from ...components.partial_states import PartialStates
from ...components.query_tile import Tiling
from ...components.work import cut, for_tasks, num_threads
from ...simd import Register, index_temp, wide_temp

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


@dataclass(frozen=True, kw_only=True)
class CutTile:
    """Some tokens, whose positions may be cut among tasks; kernels add what they are.

    Parameters
    ----------
    num_tokens : int32 expression
    cost : int64 expression
        Its blocks of positions times its tokens: a million rows on a million positions make 2**34.
    before : int64 expression
        The cost of all earlier tiles.
    """

    num_tokens: object
    cost: object
    before: object


@dataclass(frozen=True)
class TileWork:
    """The tiles of a kernel, and the work on one of them.

    Parameters
    ----------
    group : int
        Rows of a token.
    positions : int
        Of a block.
    for_tiles : ``body -> cost``
        Emits ``body(tile)`` for every tile; returns the cost of all.
    begin_task : ``() -> worker``
        Makes the buffers of a task. A worker has ``run_blocks(a, tile, rows, begin, end)``, which
        attends to blocks of positions from a cleared state, the sums `o`, and their state.
    rows_of : ``tile -> rows``
        The source of K and V.
    at : ``(tile, row) -> (token, query head)``
    output : ``() -> Output``
        Made by every task, which owns its variables.
    """

    group: int
    positions: int
    for_tiles: Callable[[Callable[[CutTile], None]], Any]
    begin_task: Callable[[], Any]
    rows_of: Callable[[CutTile], Any]
    at: Callable[[CutTile, Any], tuple]
    output: Callable[[], Output]


def emit_cut_tiles(spec: KernelSpec, ops, a: AttentionInputs, tiles: TileWork) -> None:
    """Emit the body of a kernel."""
    total = tiles.for_tiles(lambda tile: None)
    width = tiles.group * (spec.qk_head_dim + spec.v_head_dim)
    work = total * (tiles.positions * width)
    max_tasks = T.cast(T.min(T.cast(num_threads(), "int64"), total), "int32")
    num_tasks = index_temp(T.if_then_else(work > SERIAL_WORK, max_tasks, 1))
    states = PartialStates(spec, num_tasks, Tiling.of(spec).tokens * tiles.group)

    def row_of(worker, row):
        state = worker.row_state(row)
        return worker.o, row, worker.state.row_max[state], worker.state.row_sum[state]

    def begin_of(task):
        return wide_temp(cut(total, task, num_tasks, "int64"))

    ops.begin([b for b in (a.q, a.pages) if str(b.dtype) == "bfloat16"])

    def attend(task):
        worker, output = tiles.begin_task(), tiles.output()
        task_begin, task_end = begin_of(task), begin_of(task + 1)

        def attend_tile(tile: CutTile):
            begin = wide_temp(T.max(task_begin - tile.before, T.int64(0)))
            end = wide_temp(T.min(task_end - tile.before, tile.cost))
            with T.If(begin < end), T.Then():
                rows = tiles.rows_of(tile)

                def block_of(cost):
                    block = (cost + tile.num_tokens - 1) // tile.num_tokens
                    return index_temp(T.cast(block, "int32"))

                worker.run_blocks(a, tile, rows, block_of(begin), block_of(end))
                num_rows = index_temp(tile.num_tokens * tiles.group)
                if a.rope.restores:
                    with T.serial(num_rows) as row:
                        a.rope.restore(worker.o, row)
                with T.If(T.And(begin == 0, end == tile.cost)):
                    with T.Then(), T.serial(num_rows) as row:
                        output.finish(*tiles.at(tile, row), *row_of(worker, row))
                    with T.Else(), T.serial(num_rows) as row:
                        states.put(task, begin > 0, row, *row_of(worker, row))

        tiles.for_tiles(attend_tile)

    with ops.scope():
        for_tasks(num_tasks, attend)

    def merge(task):
        """Finish some rows of every tile that was cut."""
        first = Register(1, "int32", T.int32(0))  # the task that begins the tile
        output = tiles.output()

        def merge_tile(tile: CutTile):
            end = wide_temp(tile.before + tile.cost)
            with T.While(cut(total, first.get() + 1, num_tasks, "int64") <= tile.before):
                first.set(first.get() + 1)
            with T.If(cut(total, first.get() + 1, num_tasks, "int64") < end), T.Then():
                count = Register(1, "int32", T.int32(1))
                with T.While(cut(total, first.get() + count.get(), num_tasks, "int64") < end):
                    count.set(count.get() + 1)
                num_rows = index_temp(tile.num_tokens * tiles.group)
                rows = [index_temp(cut(num_rows, task + i, num_tasks)) for i in range(2)]
                with T.serial(*rows) as row:
                    at = tiles.at(tile, row)
                    states.merge(first.get(), count.get(), row, output, *at)

        tiles.for_tiles(merge_tile)

    with T.If(num_tasks > 1), T.Then():
        for_tasks(num_tasks, merge)
    states.free()
