# SPDX-License-Identifier: Apache-2.0
"""The launcher's choice among several tilings.

What a block may have of shared memory is known where the kernels run, not where they are built:
machine code for 8.0 runs on 8.6 and 8.9, and PTX for 9.0 on 12.0, whose blocks have less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ..emit import as_count
from ..launcher import block_shared_bytes
from .tiling import Tiling


def emit_chosen(tilings: Sequence[Tiling], num_rows, num_items, emit: Callable) -> None:
    """Emit ``emit(tiling)`` for each tiling; the launcher takes the first that suits.

    A tiling suits if a block of the device may have its shared memory, and if an item has more rows
    than a tile of the next one: warps without rows would only wait. The last one suits always.

    Parameters
    ----------
    tilings : sequence of Tiling
        What `Tiling.choices` returns.
    num_rows : integer expression
        Rows of all items, tokens times heads, known to the host.
    num_items : int32 expression
        Sequences or segments, whose rows share tiles.
    emit : callable
        Emits allocations and launches.
    """
    tiling, *others = tilings
    if not others:
        emit(tiling)
        return
    has_memory = block_shared_bytes() >= tiling.num_bytes
    has_rows = as_count(num_rows) > as_count(num_items) * others[0].rows
    with T.If(T.And(has_memory, has_rows)):
        with T.Then():
            emit(tiling)
        with T.Else():
            emit_chosen(others, num_rows, num_items, emit)
