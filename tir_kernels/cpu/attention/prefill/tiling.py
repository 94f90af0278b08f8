# SPDX-License-Identifier: Apache-2.0
"""Cache and register blocking of the rows of a prefill tile."""

from __future__ import annotations

from dataclasses import dataclass

from ....semantics.visibility import Gap
from ....spec import KernelSpec
from ..kv_rows import PagedRows, RaggedRows

POSITIONS = 64  # of a tile of K and V
VECTORS = 2  # of a register tile


@dataclass(frozen=True)
class Tiling:
    """Cache and register blocking of the rows of a tile.

    Parameters
    ----------
    tokens : int
        Tokens of a tile; times the group size, its rows.
    rows : int
        Rows of a register tile.
    """

    tokens: int
    rows: int
    group_size: int

    @property
    def num_blocks(self) -> int:
        """Register tiles of a full tile."""
        return -(-self.tokens * self.group_size // self.rows)

    @staticmethod
    def of(spec: KernelSpec) -> Tiling:
        """Choose so that Q and O of a tile take at most half a megabyte."""
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
