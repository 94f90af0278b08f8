# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with codes, as matrices of 2 x 8 and 8 x 2 bytes (``smmla``).

The two rows of a matrix on the left are the high and the low bytes of eight numbers of a row of Q,
or of weights; those on the right are two positions of K, or two columns of V. So a vector of sums
has those of high bytes for two lanes of a block, then those of low bytes.
"""

from ..isa.bytes.byte_shuffles import INT32
from ..isa.neon.matrix_bytes import MatrixBytes
from ..isa.simd import load, shuffle, store, temp
from .code_products import CodeProducts

LANES = 4
HALVES = [0, 4, 1, 5], [2, 6, 3, 7]  # of the lanes of two vectors, lane by lane
PAIRS = [0, 1, 4, 5], [2, 3, 6, 7]  # the first two lanes of two vectors, and the last


class MatrixCodeProducts(CodeProducts):
    """`CodeProducts` for AArch64 with FEAT_I8MM."""

    depth = 2
    rows_of_bytes = MatrixBytes

    def _add_dwords(self, totals, first_sum, of_set, dword, halves: range) -> None:
        """Add the products of two dwords of K in each half, and of Q."""
        num_dwords, index = self.blocks.k_rows.code_bytes // 4, first_sum
        codes = [self.blocks.k_vectors(dword + i, halves) for i in range(2)]
        right = [_halves(pair) for pair in zip(*codes, strict=True)]
        for r in range(self.blocking.rows):
            for half, matrices in zip(halves, right, strict=True):
                left = self.q.matrix(of_set, r, num_dwords * half + dword)
                self._add(totals, index, left, matrices)
                index = index + 2

    def _add_quads(self, totals, quad, vectors: range) -> None:
        """Add the products with eight positions of V."""
        right = [
            _halves([load(self.blocks.v, (quad + i, c, 0), LANES, INT32) for i in range(2)])
            for c in vectors
        ]
        for r in range(self.blocking.rows):
            packed_rows = [self._packed_row(r, c) for c in vectors]
            left = {
                row: temp(self.weights.matrix(0, row, quad), LANES, INT32)
                for row in sorted(set(packed_rows))
            }
            for c, (row, matrices) in enumerate(zip(packed_rows, right, strict=True)):
                self._add(totals, 2 * (r * len(vectors) + c), left[row], matrices)

    def _add(self, totals, index, left, matrices) -> None:
        """Add the products of a matrix and of those of four lanes of a block."""
        for n, right in enumerate(matrices):
            at = (index + n, 0)
            total = self.dots.add_matrices(load(totals, at, LANES, INT32), left, right)
            store(totals, at, LANES, total, INT32)

    def _separate(self, totals) -> None:
        """Bring the sums of high and of low bytes apart."""
        for i in range(0, int(totals.shape[0]), 2):
            pair = [temp(load(totals, (i + n, 0), LANES, INT32), LANES, INT32) for n in range(2)]
            for n, order in enumerate(PAIRS):
                store(totals, (i + n, 0), LANES, shuffle(pair, order), INT32)


def _halves(pair) -> list:
    """Matrices of the first two lanes of two vectors of dwords, and of the last two."""
    pair = [temp(vector, LANES, INT32) for vector in pair]
    return [temp(shuffle(pair, order), LANES, INT32) for order in HALVES]
