# SPDX-License-Identifier: Apache-2.0
"""How the rows of a prefill tile go through the caches and the registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ....semantics.visibility import Gap, Span
from ....spec import KernelSpec
from ...simd import index_temp
from ..kv_rows import PagedRows, RaggedRows

POSITIONS = 64  # of a tile of K and V


@dataclass(frozen=True)
class Tiling:
    """How the rows of a unit go through the caches and the registers.

    Parameters
    ----------
    tokens : int
        Tokens of a unit; times the group size, its rows.
    rows : int
        Rows of a register tile.
    """

    tokens: int
    rows: int
    group_size: int

    @property
    def num_blocks(self) -> int:
        """Register tiles of a full unit."""
        return -(-self.tokens * self.group_size // self.rows)

    @staticmethod
    def of(spec: KernelSpec) -> Tiling:
        """Choose so that Q and O of a unit take at most half a megabyte."""
        rows = max(32, min(512, 131072 // (spec.qk_head_dim + spec.v_head_dim)))
        tokens = max(1, min(256, rows // spec.group_size))
        return Tiling(tokens, 8 if spec.target.registers >= 32 else 6, spec.group_size)


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """Some tokens of a sequence with the query heads of one KV head, and what they attend to.

    Parameters
    ----------
    rows : PagedRows or RaggedRows
        K and V of the sequence.
    kv_len : int32 expression
        Positions of the sequence.
    gap : Gap, optional
        What the sequence has dropped.
    k_offset : int32 expression
        RoPE position of column 0.
    head : int32 expression
        The KV head.
    first_row, num_rows : int32 expressions
        The sequence's rows of Q.
    first_token, num_tokens : int32 expressions
        Tokens of the tile, counted from `first_row`.
    """

    rows: PagedRows | RaggedRows
    kv_len: object
    gap: Gap | None
    k_offset: object
    head: object
    first_row: object
    num_rows: object
    first_token: object
    num_tokens: object


@dataclass(frozen=True)
class TileView:
    """Some register tiles of rows and the packed tile of columns that they attend to.

    Parameters
    ----------
    block, count, num_all : int32 expressions
        First block, their number, and the number of all blocks of the unit.
    part_rows : int32 expression
        Rows of the next tile to prefetch with each product.
    first, first_row : int32 expressions
        First column of the tile, and first row of the blocks.
    end_of, begin_of : callable
        Row -> bounds of the columns that it sees; `begin_of` may be None.
    factor : float32 expression
        Scale of the logits times log2(e).
    span : Span
        The columns that this pass looks at.
    """

    block: object
    count: object
    num_all: object
    part_rows: object
    first: object
    first_row: object
    end_of: Callable
    begin_of: Callable | None
    factor: object
    span: Span

    @property
    def has_gap(self) -> bool:
        """Whether some columns before the span were dropped."""
        return self.span.begin is not None

    def seen_by(self, row):
        """How many columns some row up to that one sees.

        On the diagonal no row sees the tile's last columns, and of sinks there are few: the other
        columns are left out.
        """
        end = self.end_of(self.first_row + row)
        end = T.min(end, self.span.end) if self.has_gap else end
        return index_temp(T.max(T.min(POSITIONS, end - self.first), 0))
