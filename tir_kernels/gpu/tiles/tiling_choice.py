# SPDX-License-Identifier: Apache-2.0
"""The launcher's choice among several tilings.

What a block may have of shared memory is known where the kernels run, not where they are built:
machine code for 8.0 runs on 8.6 and 8.9, and PTX for 9.0 on 12.0, whose blocks have less.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ..registers import as_count
from .tiling import Tiling


def suits_first(isa, tilings: Sequence[Tiling], num_rows, num_items):
    """Whether the launcher is to take the first of at least two tilings.

    A tiling suits if a block of the device may have its shared memory, and if an item has more rows
    than a tile of the next one: warps without rows would only wait. The last one suits always.

    Parameters
    ----------
    isa : Isa
    tilings : sequence of Tiling
        What `Tiling.choices` returns.
    num_rows : integer expression
        Rows of all items, tokens times heads, known to the host.
    num_items : int32 expression
        Sequences or segments, whose rows share tiles.
    """
    has_memory = isa.block_shared_bytes() >= tilings[0].num_bytes
    has_rows = as_count(num_rows) > as_count(num_items) * tilings[1].rows
    return T.And(has_memory, has_rows)
