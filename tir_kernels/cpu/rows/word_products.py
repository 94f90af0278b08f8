# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V, as words (AVX2).

Q and the weights become integers of 16 bits, as in `byte_products`. Codes are widened to words
where they are read (``vpmaddwd``). K in 4 bits is multiplied by `ByteQK`, with `BytePairs`.

Two rows of V are widened at a time, so that a dword has a column of both. Codes of 4 bits are
unsigned there; what the 8 that is in each adds is subtracted where sums begin. Bytes of packed
codes that lie side by side share a word until they are multiplied, so a vector of sums has every
second column. Columns of O are in that order until `finish`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.bytes.words import LANES, RowWords, dot, in_order, integer
from ..isa.shuffles import INT32, next_power_of_two
from ..isa.simd import F32, broadcast, constant, load, shuffle, store, temp
from .code_rows import CodeRows, CodeScales
from .float_products import store_lane_sums
from .kv_blocks import BLOCK, KvBlocks
from .local_rows import Blocking, max_local_rows
from .prefetch import CodePrefetch

CODES = 2 * LANES  # of a vector of words
WORDS = f"int16x{CODES}"
POSITIONS = 16  # of V, whose weights' dwords are side by side; of K, for each prefetch
HALF = POSITIONS // 2  # between the two positions of a dword


@T.meta_class
class WordQK:
    """Multiplies rows of Q with the codes of K in 8 bits."""

    def __init__(self, spec: KernelSpec):
        self.blocking, self.positions = Blocking.of(spec), POSITIONS
        self.rows = CodeRows(spec, spec.codec.k)
        self.scales = CodeScales(spec, len(self.rows.groups), POSITIONS, POSITIONS)
        self.prefetches = CodePrefetch(spec, POSITIONS)
        self.q = RowWords(max_local_rows(spec), spec.qk_head_dim)

    @inline
    def begin_head(self, q, local_head):
        """Take the rows of Q of a local head as words."""
        padded = T.meta_var(self.blocking.padded_rows)
        for i in range(padded):
            row = local_head * padded + i
            self.q.set_rows(row, 1, lambda _, start: self._even_and_odd(q, row, start))

    def _even_and_odd(self, q, row, start: int) -> list:
        """Even and odd numbers of 16 of a row of Q."""
        both = [load(q, (row, start + n), LANES) for n in (0, LANES)]
        return [shuffle(both, range(n, 2 * LANES, 2)) for n in range(2)]

    @inline
    def begin_block(self, kv: KvBlocks, k_offset):
        """K is not rotated."""

    @inline
    def multiply(self, q, kv: KvBlocks, scores):
        """``S = Q K^T`` for a local head and a block of positions."""
        count = T.meta_var(self.blocking.positions)
        num_steps = T.meta_var(POSITIONS // count)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            position = kv.first + i * POSITIONS
            following = kv.next.first + i * POSITIONS
            prefetch = T.meta_var(self.prefetches.beside_k(kv, position, following))
            tile = kv.rows.tile(position, POSITIONS)
            self.scales.gather(tile.k, 0)
            for step in range(num_steps):
                prefetch(step, num_steps)
                for row_set in range(self.blocking.row_sets):
                    self._multiply_tile(kv, tile, step * count, scores, row_set, i * POSITIONS)
        for row_set in range(self.blocking.row_sets):
            self._scale(scores, kv.local_head, row_set)

    @inline
    def _multiply_tile(self, kv, tile, first, scores, row_set, column):
        """Multiply a row set with some positions of a tile, from `first` on."""
        num_rows, count = T.meta_var((self.blocking.rows, self.blocking.positions))
        first_row = (kv.local_head * self.blocking.row_sets + row_set) * num_rows
        sums = T.alloc_local((num_rows, count * LANES), F32)
        for r in T.unroll(num_rows):
            for t in T.unroll(count):
                store(sums, (r, t * LANES), LANES, constant(0.0, LANES))
        totals = T.alloc_local((num_rows * count, LANES), INT32)
        columns = T.meta_var(4 * self.rows.piece)
        for piece in T.unroll(self.rows.num_pieces):
            for i in T.unroll(num_rows * count):
                store(totals, (i, 0), LANES, integer(0), INT32)
            for c in T.unroll(columns // CODES):
                self._add_codes(first_row, tile, first, piece * columns + c * CODES, totals)
            self._add_piece(totals, piece, first, sums)
        store_lane_sums(sums, scores, row_set * num_rows, column + first, self.blocking, LANES)

    def _add_codes(self, first_row, tile, first, column, totals) -> None:
        """Add the products with 16 columns of some positions."""
        for t in range(self.blocking.positions):
            pages, (*row, _) = tile.k(first + t, 0)
            codes = T.cast(pages.codes[(*row, T.ramp(column, 1, CODES))], WORDS)
            words = temp(T.reinterpret("int32x8", codes), LANES, INT32)
            for r in range(self.blocking.rows):
                q, at = self.q.vector(first_row + r, column // 2), (self._at(r, t), 0)
                total = load(totals, at, LANES, INT32)
                store(totals, at, LANES, dot(total, words, q), INT32)

    def _at(self, r: int, t: int) -> int:
        """Index of the sums of a row of Q and a position."""
        return r * self.blocking.positions + t

    def _add_piece(self, totals, piece, first, sums) -> None:
        """Add the sums of a piece of the columns, times the scales of K."""
        group = self.rows.group_of(piece, 0)
        for t in range(self.blocking.positions):
            scale = broadcast(temp(self.scales.values[group, first + t]), LANES)
            for r in range(self.blocking.rows):
                value, at = load(totals, (self._at(r, t), 0), LANES, INT32), (r, t * LANES)
                total = load(sums, at, LANES) + T.cast(value, "float32x8") * scale
                store(sums, at, LANES, total)

    @inline
    def _scale(self, scores, local_head, row_set):
        """Multiply scores with the scales of the rows of Q."""
        num_rows = T.meta_var(self.blocking.rows)
        for r in range(num_rows):
            row = (local_head * self.blocking.row_sets + row_set) * num_rows + r
            scale = self.q.scale[row]
            for c in T.unroll(BLOCK // LANES):
                at = T.meta_var((row_set * num_rows + r, c * LANES))
                value = T.meta_var(load(scores, at, LANES) * broadcast(scale, LANES))
                store(scores, at, LANES, value)


class Columns(NamedTuple):
    """Columns of V that are summed at once, of some bytes of codes.

    Parameters
    ----------
    width : int
        Bytes that are read of a row.
    words : tuple of int
        Packed codes: the words of these bytes that are multiplied.
    is_high : bool
        Packed codes: whether they are those in the upper bits of bytes, of the second half of O.
    """

    width: int
    words: tuple[int, ...] = ()
    is_high: bool = False


@T.meta_class
class WordPV:
    """Adds the codes of V, times weights that have taken in their scales, to rows of O.

    Parameters
    ----------
    spec : KernelSpec
    positions : int
        Positions whose scales are gathered, and codes prefetched, at once.
    """

    def __init__(self, spec: KernelSpec, positions: int):
        self.spec, self.blocking, self.positions = spec, Blocking.of(spec), positions
        self.rows = rows = CodeRows(spec, spec.codec.v)
        self.is_packed, self.num_groups = rows.codec.is_packed, len(rows.groups)
        # Bytes of codes that are read of a row at once: they share scales.
        self.width = 4 * rows.piece if self.is_packed else CODES
        self.scales = CodeScales(spec, self.num_groups, positions, BLOCK)
        self.prefetches = CodePrefetch(spec, positions)
        num_rows = self.blocking.rows * self.num_groups
        self.weights = RowWords(num_rows, BLOCK)
        self.offsets = T.alloc_buffer((num_rows + LANES,), INT32)

    @inline
    def load_v(self, kv: KvBlocks):
        """Gather the scales of V of a block of positions."""
        for i in range((kv.count + self.positions - 1) // self.positions):
            tile = kv.rows.tile(kv.first + i * self.positions, self.positions)
            self.scales.gather(tile.v, i * self.positions)
        if kv.hides_some:
            self.scales.hide(kv)

    @inline
    def multiply(self, weights, kv: KvBlocks, o, rescale, row_set):
        """``O = O * rescale + P V`` for a row set."""
        num_rows, groups = T.meta_var((self.blocking.rows, self.num_groups))
        first_row = (kv.local_head * self.blocking.row_sets + row_set) * self.blocking.rows
        if groups > 1:
            for r in range(num_rows):
                row = row_set * num_rows + r
                self._set_weights(weights, r * groups, groups, lambda i: (row, i))
        else:
            self._set_weights(weights, 0, num_rows, lambda i: (row_set * num_rows + i, 0))
        for i in range(self.rows.code_bytes // self.width):
            self._add_bytes(kv, i, o, first_row, rescale)

    def _set_weights(self, weights, first, count: int, source: Callable) -> None:
        """Take some rows of weights as words, those of the row and the group ``source(i)``."""
        self.weights.set_rows(first, count, lambda i, n: self._scaled(weights, *source(i), n))
        if self.is_packed:
            lanes = next_power_of_two(count)
            zero = broadcast(T.int32(-self.rows.zero), lanes)
            offsets = self.weights.sums(first, count) * zero
            store(self.offsets, (first,), lanes, offsets, INT32)

    def _scaled(self, weights, row, group, start: int) -> list:
        """Weights of a row times the scales of V: of 8 positions, and of those `HALF` later."""
        return [
            load(weights, (row, first), LANES) * self.scales.vector(group, first, LANES)
            for first in (start, start + HALF)
        ]

    def _add_bytes(self, kv, i, o, first_row, rescale) -> None:
        """Add the products with the `width` bytes number `i` of the codes."""
        each = _columns_of(self.width, self.is_packed)
        num_turns = len(each) * (self.rows.code_bytes // self.width)
        num_parts = min(self.positions, 1 << num_turns.bit_length() - 1)
        for n, columns in enumerate(each):
            part = (i * len(each) + n) % num_parts
            self._add_columns(kv, i * self.width, columns, o, first_row, rescale, part, num_parts)

    @inline
    def _add_columns(self, kv, begin, columns, o, first_row, rescale, part, num_parts):
        """Add the products with some columns, from byte `begin` of the codes on.

        A part of what comes next is prefetched.
        """
        sums = T.alloc_local((2 * self.blocking.rows, LANES), INT32)
        self._begin_sums(sums, begin, columns)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            tile = kv.rows.tile(kv.first + i * POSITIONS, POSITIONS)
            following = T.meta_var(kv.next.first + i * POSITIONS)
            self.prefetches.beside_v(kv, following, POSITIONS, part, num_parts)
            for t in T.unroll(HALF):
                self._add_pair(tile, t, i * HALF + t, begin, columns, sums)
        self._put_sums(sums, begin, columns, o, first_row, rescale)

    def _weights_row(self, r: int, begin, columns: Columns):
        """Row of `weights` that has those of row `r` for the group of some columns."""
        if self.num_groups == 1:
            return r
        column = begin + columns.is_high * self.rows.code_bytes
        return r * self.num_groups + column * self.num_groups // self.spec.v_head_dim

    def _begin_sums(self, sums, begin, columns: Columns) -> None:
        for r in range(self.blocking.rows):
            value = integer(0)
            if self.is_packed:
                offset = self.offsets[self._weights_row(r, begin, columns)]
                value = broadcast(temp(offset, 1, INT32), LANES)
            for vector in range(2):
                store(sums, (2 * r + vector, 0), LANES, value, INT32)

    def _add_pair(self, tile, t, dword, begin, columns: Columns, sums) -> None:
        """Add the products with positions `t` and ``t + HALF`` of a tile."""
        both = []
        for position in (t, t + HALF):
            pages, (*row, _) = tile.v(position, 0)
            codes = pages.codes[(*row, T.ramp(begin, 1, columns.width))]
            both.append(temp(codes, columns.width, str(pages.codes.dtype)))
        words = _packed_words(both, columns) if columns.words else _words(both)
        for r in range(self.blocking.rows):
            row = self._weights_row(r, begin, columns)
            weight = temp(broadcast(self.weights.words[row, dword], LANES), LANES, INT32)
            for vector, value in enumerate(words):
                at = (2 * r + vector, 0)
                total = load(sums, at, LANES, INT32)
                store(sums, at, LANES, in_order(dot(total, value, weight)), INT32)

    def _put_sums(self, sums, begin, columns: Columns, o, first_row, rescale) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        for r in range(self.blocking.rows):
            factor = temp(rescale(first_row + r))
            scale = temp(self.weights.scale[self._weights_row(r, begin, columns)])
            for vector in range(2):
                value = load(sums, (2 * r + vector, 0), LANES, INT32)
                value = T.cast(value, "float32x8") * broadcast(scale, LANES)
                at = (first_row + r, self._column(begin, columns) + vector * LANES)
                before = load(o, at, LANES) * broadcast(factor, LANES)
                store(o, at, LANES, before + value)

    def _column(self, begin, columns: Columns):
        """Return the column of a row of O where the sums of some columns begin."""
        if columns.words and columns.words[0]:
            begin = begin + 2 * LANES
        return begin + columns.is_high * self.rows.code_bytes

    @inline
    def finish(self, o, num_heads):
        """Put the sums of the local heads into the order of the columns."""
        if self.is_packed:
            for row in range(num_heads * self.blocking.padded_rows):
                self._order_columns(o, row)

    def _order_columns(self, o, row) -> None:
        places = {}  # of columns among those of as many bytes
        for columns in _columns_of(self.width, True):
            for lane, word in enumerate(columns.words):
                for is_odd in range(2):
                    place = self._column(0, columns) + is_odd * LANES + lane
                    places[2 * word + is_odd] = place % self.rows.code_bytes
        for first in range(0, self.spec.v_head_dim, self.width):
            at = [(row, first + c) for c in range(0, self.width, LANES)]
            vectors = [temp(load(o, each, LANES), LANES) for each in at]
            for v, each in enumerate(at):
                found = [places[c] for c in range(v * LANES, (v + 1) * LANES)]
                used = sorted({i // LANES for i in found})
                order = [used.index(i // LANES) * LANES + i % LANES for i in found]
                store(o, each, LANES, shuffle([vectors[i] for i in used], order))


def _columns_of(width: int, is_packed: bool) -> list[Columns]:
    """Return the columns of some bytes of codes that are summed one after another."""
    if not is_packed:
        return [Columns(width)]
    # Words that an instruction interleaves: of each 128 bits either half.
    num_parts = width // 16
    sets = [[8 * p + 4 * n + i for p in range(num_parts) for i in range(4)] for n in range(2)]
    words = sets if num_parts == 2 else [sorted(sets[0] + sets[1])]
    return [Columns(width, tuple(each), is_high) for each in words for is_high in (False, True)]


def _words(both: list) -> list:
    """16 codes of 8 bits of two rows as two vectors of words, a column of both in a dword."""
    found = []
    for vector in range(2):
        columns = range(vector * LANES, (vector + 1) * LANES)
        codes = shuffle(both, [x for c in columns for x in (c, CODES + c)])
        words = T.cast(temp(codes, CODES, "int8"), WORDS)
        found.append(temp(T.reinterpret("int32x8", words), LANES, INT32))
    return found


def _packed_words(both: list, columns: Columns) -> list:
    """Codes of 4 bits of two rows: those of the first byte of each word, and of the second."""
    count = columns.width // 2
    rows = [temp(T.reinterpret(f"uint16x{count}", x), count, "uint16") for x in both]
    words = shuffle(rows, [x for word in columns.words for x in (word, count + word)])
    words = temp(words, CODES, "uint16")
    found = []
    for shift in (4, 12) if columns.is_high else (0, 8):
        codes = T.shift_right(words, broadcast(T.uint16(shift), CODES)) if shift else words
        if shift < 12:
            codes = T.bitwise_and(codes, broadcast(T.uint16(15), CODES))
        found.append(temp(T.reinterpret("int32x8", codes), LANES, INT32))
    return found
