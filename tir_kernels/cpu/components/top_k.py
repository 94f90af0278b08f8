# SPDX-License-Identifier: Apache-2.0
"""The largest scores of a row, found digit by digit of their bits."""

from tvm.script import tirx as T

from ...script import inline
from ..simd import temp
from .partial_states import Workspace

_BINS = 1 << 11
_SIGN = 1 << 31


@T.meta_class
class TileScores:
    """float32 scores of some rows, in memory of the call.

    Parameters
    ----------
    num_rows : int
    width : int32 expression
        Scores of a row.
    """

    def __init__(self, num_rows: int, width):
        self.width = T.local_scalar("int64")
        self.width_of_call = width
        self.memory = Workspace(width * num_rows, (), what="scores")
        self.buffer = self.memory.buffer

    @inline
    def begin(self):
        """Keep the width."""
        self.width = T.cast(self.width_of_call, "int64")

    def at(self, row, column):
        """Index of a score in `buffer`."""
        return T.cast(row, "int64") * self.width + column

    def of(self, row, column):
        """Return a score."""
        return self.buffer[self.at(row, column)]


@T.meta_class
class TopK:
    """Chooses the positions of the largest scores; of equal ones the first positions.

    Parameters
    ----------
    scores : TileScores
    positions : int32 Buffer ``[T, k]``
    k : int32
    """

    def __init__(self, scores, positions, k):
        self.scores, self.positions, self.k = scores, positions, k
        self.bins = T.alloc_buffer((_BINS,), "int32")
        self.prefix, self.mask = T.local_scalar("uint32"), T.local_scalar("uint32")
        self.left, self.bin, self.at = (T.local_scalar("int32") for _ in range(3))

    def key(self, row, column):
        """A number of 32 bits in whose order the scores are."""
        bits = temp(T.reinterpret("uint32", self.scores.of(row, column)), 1, "uint32")
        is_negative = bits >= T.uint32(_SIGN)
        flipped = T.Select(is_negative, T.uint32(0xFFFFFFFF), T.uint32(_SIGN))
        return temp(T.bitwise_xor(bits, flipped), 1, "uint32")

    @inline
    def choose(self, row, count, token):
        """Store the positions of the largest of `count` scores of a row, in order, then -1."""
        self.at = 0
        if count <= self.k:
            for column in range(count):
                self.positions[token, column] = column
            self.at = count
        else:
            self._find(row, count)
            for column in range(count):
                key = self.key(row, column)
                if key > self.prefix:
                    self._put(token, column)
                elif T.And(key == self.prefix, self.left > 0):
                    self.left -= 1
                    self._put(token, column)
        for i in range(self.k - self.at):
            self.positions[token, self.at + i] = -1

    @inline
    def _put(self, token, column):
        self.positions[token, self.at] = column
        self.at += 1

    @inline
    def _find(self, row, count):
        """Find the smallest key that is chosen, `prefix`, and how many of these keys: `left`.

        Its digits of 11, 11 and 10 bits, one after another.
        """
        self.prefix = T.uint32(0)
        self.mask = T.uint32(0)
        self.left = self.k
        self._find_digit(row, count, 21, 11)
        self._find_digit(row, count, 10, 11)
        self._find_digit(row, count, 0, 10)

    @inline
    def _find_digit(self, row, count, first_bit, bits):
        num_bins = T.meta_var(1 << bits)
        shift, low = T.meta_var((T.uint32(first_bit), T.uint32(num_bins - 1)))
        for i in range(num_bins):
            self.bins[i] = 0
        for column in range(count):
            key = self.key(row, column)
            if T.bitwise_and(key, self.mask) == self.prefix:
                digit = T.cast(T.bitwise_and(T.shift_right(key, shift), low), "int32")
                self.bins[digit] += 1
        self.bin = num_bins - 1
        while self.bins[self.bin] < self.left:
            self.left -= self.bins[self.bin]
            self.bin -= 1
        self.prefix = T.bitwise_or(self.prefix, T.shift_left(T.cast(self.bin, "uint32"), shift))
        self.mask = T.bitwise_or(self.mask, T.shift_left(low, shift))
