# SPDX-License-Identifier: Apache-2.0
"""Register blocking of a decode split: its rows and its positions."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec import KernelSpec
from ..kv_rows import PagedRows

BLOCK = 64  # positions of a softmax step
STATE_BYTES = 1 << 16  # of the rows of Q and O of a split, which stay in L2


@dataclass(frozen=True)
class Blocking:
    """Register blocking of the rows of a group and the positions of a block.

    Parameters
    ----------
    rows : int
        Query heads whose accumulators are live at once.
    row_blocks : int
        Such sets in a group; the last one may be padded.
    positions : int
        Rows of K that are multiplied at once.
    vectors : int
        Vectors of an output row that are live at once.
    """

    rows: int
    row_blocks: int
    positions: int
    vectors: int

    @property
    def padded_rows(self) -> int:
        """Rows of the group's buffers."""
        return self.rows * self.row_blocks

    def max_local_heads(self, spec: KernelSpec) -> int:
        """KV heads of a split: all, or so many that their rows of Q and O stay in L2."""
        row_bytes = 4 * (spec.qk_head_dim + spec.v_head_dim)
        max_heads = max(1, STATE_BYTES // (row_bytes * self.padded_rows))
        return -(-spec.num_kv_heads // -(-spec.num_kv_heads // max_heads))

    @staticmethod
    def of(spec: KernelSpec) -> Blocking:
        """Choose for a spec."""
        max_rows, accumulators = (8, 16) if spec.target.registers >= 32 else (4, 8)
        row_blocks = -(-spec.group_size // max_rows)
        rows = -(-spec.group_size // row_blocks)
        positions = 1 << ((accumulators + rows // 2) // rows).bit_length() - 1
        positions = min(positions, 8, spec.target.lanes)  # whose sums fill at most a vector
        return Blocking(rows, row_blocks, positions, max(1, accumulators // rows))


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One softmax step: a block of positions of one KV head.

    Parameters
    ----------
    rows : PagedRows
        K and V of the KV head.
    following : PagedRows
        K and V that are attended to next, to be prefetched.
    following_first : int32 expression
        First position to prefetch.
    first, count : int32 expressions
        First position of the block, and how many it has.
    before : int32 expression, optional
        Hidden positions at the start of the block; None: there are none in any block.
    local_head : int32 expression
        KV head, counted from the first one of the split.
    """

    rows: PagedRows
    following: PagedRows
    following_first: object
    first: object
    count: object
    before: object
    local_head: object
