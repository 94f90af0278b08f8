# SPDX-License-Identifier: Apache-2.0
"""Prefetches of single query rows: all that is asked for before it is needed, and when.

A CPU drops prefetches while its miss queue is full, and a dropped line costs the whole latency when
it is needed. Every line is therefore prefetched several times:

* one head ahead: the same positions of the next local head, then the next block of the first one,
* half a head ahead: lines of V while K is multiplied,
* a few rows ahead.

On Zen 4 one thread reads a quarter more bytes per second in float32; data that is in the caches
already is processed up to 15 % slower.
"""

from collections.abc import Callable

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ..isa.simd import F32, INTO_L1, INTO_L2, elements_per_line, prefetch

SOON = 8  # positions between a line's last prefetch and its use
LINE = 64  # bytes


@T.meta_class
class NextRows:
    """K and V that a task reads after those of its local head and block; see `KvBlocks`.

    Parameters
    ----------
    kv : KvBlocks
    find : callable
        Makes `PagedRows` of a KV head of the sequence.

    Attributes
    ----------
    rows : PagedRows
        K and V of the next local head.
    first : int32
        The first of its positions that are read next.
    """

    def __init__(self, kv, find: Callable):
        self.kv, self.head, self.first = kv, T.local_scalar("int32"), T.local_scalar("int32")
        self.last = T.local_scalar("int32")
        self.block_head, self.block_first = T.local_scalar("int32"), T.local_scalar("int32")
        self.rows = find(self.head)

    @inline
    def begin_span(self, last):
        """Let the positions up to `last` be read in order, though by several splits."""
        self.last = last

    @inline
    def begin_block(self, after):
        """Find what follows the last local head of a block: position `after` of the first one.

        After the last position of the span come the next heads of the pages.
        """
        is_last = T.meta_var(after >= self.last)
        self.block_first = T.if_then_else(is_last, self.kv.restart, after)
        self.block_head = T.if_then_else(is_last, self.kv.num_heads, 0)

    @inline
    def begin_head(self, local_head):
        """Find what follows a local head of the block."""
        kv, last_head = T.meta_var((self.kv, self.kv.spec.num_kv_heads - 1))
        is_last = T.meta_var(local_head == kv.num_heads - 1)
        head = T.meta_var(T.if_then_else(is_last, self.block_head, local_head + 1))
        self.head = T.min(kv.first_head + head, last_head)
        self.first = T.if_then_else(is_last, self.block_first, kv.first)


class FloatPrefetch:
    """Prefetches of rows that are multiplied as they lie in the pages.

    Parameters
    ----------
    spec : KernelSpec
    values_per_element : int
        As of the operands.
    """

    def __init__(self, spec: KernelSpec, values_per_element: int):
        self.values_per_element = values_per_element
        self.k_line, self.v_line = (
            elements_per_line(dtype) // values_per_element for dtype in (spec.k_dtype, spec.v_dtype)
        )

    def beside_k(self, kv, tile, position, offset, count: int) -> Callable:
        """Return ``(row, element)``, to be called for each line of K of a tile that is multiplied.

        The tile has `count` positions from `position` on, which is `offset` in the block.
        """
        soon = kv.rows.tile(position + SOON, count)
        following = kv.next.rows.tile(kv.next.first + offset, count)

        def prefetch_line(row, element) -> None:
            column = element * self.values_per_element
            following.prefetch_k(row, column)
            tile.prefetch_v(row, column)
            soon.prefetch_k(row, column)

        return prefetch_line

    def beside_v(self, kv, tile, offset, count: int) -> Callable:
        """Return ``(row, element, width)``, to be called for columns of V that are multiplied."""
        following = kv.next.rows.tile(kv.next.first + offset, count)

        def prefetch_lines(row, element, width: int) -> None:
            with T.unroll((width + self.v_line - 1) // self.v_line) as i:
                column = (element + i * self.v_line) * self.values_per_element
                following.prefetch_v(row, column)
                following.prefetch_k(row, column)
                if count > SOON:
                    tile.prefetch_v(row + SOON, column)

        return prefetch_lines


class CodePrefetch:
    """Prefetches of codes and scales, some of them beside each step of the products.

    Asking for much at once would wait for memory. A step has few enough lines for L1, but CPUs with
    AVX2 alone wait for that, too.

    Parameters
    ----------
    spec : KernelSpec
    positions : int
        Positions that are prefetched in one go of parts, a power of two.
    """

    def __init__(self, spec: KernelSpec, positions: int):
        self.positions = positions
        self.locality = INTO_L2 if spec.target.has_word_dot else INTO_L1
        self.row_bytes = {
            K_PLANE: spec.codec.k.row_bytes(spec.qk_head_dim),
            V_PLANE: spec.codec.v.row_bytes(spec.qk_head_dim),
        }

    def beside_k(self, kv, position, following) -> Callable:
        """Ask for the scales of what is read next; return what asks for codes.

        Parameters
        ----------
        kv : KvBlocks
        position, following : int32 expression
            The first of the positions of K that are multiplied, and of those that are read next.

        Returns
        -------
        callable
            ``(part, num_parts)``, of which the first may be an expression: for the codes of K that
            come next and soon, and of V of these positions.
        """
        for plane in (K_PLANE, V_PLANE):
            self._prefetch_scales(kv.next.rows, following, plane)
        each = [
            self._codes(kv.next.rows, following, K_PLANE),
            self._codes(kv.rows, position, V_PLANE),
            self._codes(kv.rows, position + self.positions, K_PLANE),
        ]

        def prefetch_part(part, num_parts: int) -> None:
            for prefetch_codes in each:
                prefetch_codes(part, num_parts)

        return prefetch_part

    def beside_v(self, kv, following, count: int, part, num_parts: int) -> None:
        """Ask for a part of the codes of the `count` positions that come next."""
        for first in range(0, count, self.positions):
            for plane in (V_PLANE, K_PLANE):
                self._codes(kv.next.rows, following + first, plane)(part, num_parts)

    def _prefetch_scales(self, rows, position, plane: int) -> None:
        tile, run = rows.tile(position, self.positions), min(self.positions, rows.run)
        element = {K_PLANE: tile.k, V_PLANE: tile.v}[plane]
        for first in range(0, self.positions, run):
            pages, (*row, _) = element(first, 0)
            itemsize = 4 if str(pages.scales.dtype) == F32 else 2
            for scale in range(0, run * len(pages.groups), LINE // itemsize):
                prefetch(pages.scales, (*row, scale), INTO_L1)

    def _codes(self, rows, position, plane: int) -> Callable:
        """Return ``(part, num_parts)``, which prefetches codes of `positions` positions."""
        is_one_run = rows.run >= self.positions
        whole = rows.tile(position, self.positions) if is_one_run else None

        def prefetch_part(part, num_parts: int) -> None:
            count = self.positions // num_parts
            tile, first = whole, part * count
            if not is_one_run:
                tile, first = rows.tile(position + part * count, count), 0
            element = {K_PLANE: tile.k, V_PLANE: tile.v}[plane]
            run = count if is_one_run else min(count, rows.run)
            for t in range(0, count, run):
                pages, (*row, _) = element(first + t, 0)
                for byte in range(0, run * self.row_bytes[plane], LINE):
                    prefetch(pages.codes, (*row, byte), self.locality)

        return prefetch_part
