# SPDX-License-Identifier: Apache-2.0
"""Arguments of a block: its tile of query rows, and the columns of the tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...semantics.visibility import Gap
from ..splits.partial_states import PartialStates


@dataclass(frozen=True, kw_only=True)
class TileStep:
    """A tile of a sequence's rows for one KV head, and what they attend to.

    Parameters
    ----------
    sequence : int32 expression
    rows : callable
        Number of rows that a thread copies -> where K and V of the sequence lie.
    kv_len : int32 expression
        Positions of the sequence.
    gap : Gap, optional
        What the sequence has dropped.
    k_offset : int32 expression
        RoPE position of column 0.
    length : int32 expression
        Positions of the sequence, the dropped ones included; longrope depends on it.
    head : int32 expression
        The KV head.
    slice : int32 expression
        Which columns of V the block sums.
    first_row, num_rows : int32 expressions
        The sequence's rows of Q.
    first : int32 expression
        First row of the tile, counted in tokens times heads of the group.
    is_whole : bool expression
        Whether the block sees all columns that the rows see.
    states : PartialStates
        Where the partial states of the rows go if it does not.
    """

    sequence: object
    rows: Callable
    kv_len: object
    gap: Gap | None
    k_offset: object
    length: object
    head: object
    slice: object
    first_row: object
    num_rows: object
    first: object
    is_whole: object
    states: PartialStates


@dataclass(frozen=True, kw_only=True)
class FixedSplitStep(TileStep):
    """Step of a block of several that split the columns of every tile.

    Parameters
    ----------
    split : int32 expression
        Which of the splits it attends to.
    """

    split: object


@dataclass(frozen=True, kw_only=True)
class BalancedSplitStep(TileStep):
    """Step of a block whose splits follow from the work of the whole batch.

    Parameters
    ----------
    slot : int32 expression
        Slot in `states` of the split.
    """

    slot: object
