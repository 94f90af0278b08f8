# SPDX-License-Identifier: Apache-2.0
"""The work of a `SharedTile`: rows, the positions that all of them see, and blocks of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...columns import Chunk
from ...components.kv_rows import PagedRows

POSITIONS = 64  # of a tile of K and V


class Prefetch(NamedTuple):
    """The part of the next tile of K or V to prefetch during one of `num_products` products.

    A product has `num_steps`; rows have `width` elements.
    """

    is_v: bool
    width: int
    product: object
    num_products: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class SharedStep:
    """Rows, and a range of positions that all of them see.

    Parameters
    ----------
    num_rows : int32 expression
    row_of : callable
        Row -> (row of Q, query head).
    kv_len : int32 expression
        Positions of the sequence or segment.
    begin, end : int32 expressions
        The range, in blocks of `POSITIONS`.
    k_offset : int32 expression
        RoPE position of position 0.
    """

    num_rows: object
    row_of: Callable
    kv_len: object
    begin: object
    end: object
    k_offset: object


@dataclass(frozen=True)
class KvTile:
    """A packed tile of K and V: its `first` position, and where the `rows` of the step lie."""

    first: object
    rows: PagedRows
    step: SharedStep


@dataclass(frozen=True)
class SoftmaxState:
    """Running maximum and sum of every row: float32 buffers."""

    row_max: Any
    row_sum: Any


@dataclass(frozen=True)
class RowBlock:
    """Rows that go through the registers together.

    Parameters
    ----------
    index, count : int32 expressions
        Which block it is, and how many there are.
    vector : int32 expression
        First vector of rows.
    num_vectors : int
    scalars : int
        Of a register tile.
    """

    index: object
    count: object
    vector: Any
    num_vectors: int
    scalars: int

    def parts(self, lanes: int) -> list[Chunk]:
        """The columns of a register tile."""
        return [Chunk(n * lanes, lanes) for n in range(self.num_vectors)]
