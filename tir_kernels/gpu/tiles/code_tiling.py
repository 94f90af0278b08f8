# SPDX-License-Identifier: Apache-2.0
"""Sizes of what a tile of quantized K and V takes in shared memory, besides its wide values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...codec import Codec
from ...spec import KernelSpec
from .shared_tiles import CHUNK_BYTES, TileLayout

WORD_BYTES = 4
ROW_SCALES = 2  # of a position: one for K and one for V


@dataclass(frozen=True, kw_only=True)
class CodeTiling:
    """Rows of codes and scales, as they are copied from the pages.

    Parameters
    ----------
    codec : Codec
    qk_head_dim, v_head_dim : int
    columns : int
        Of V that a block sums.
    is_latent : bool
        V is the first columns of K.
    is_widened : bool
        Whether codes are widened to tiles in shared memory, or in registers when they are
        multiplied.
    """

    codec: Codec
    qk_head_dim: int
    v_head_dim: int
    columns: int
    is_latent: bool
    is_widened: bool = True

    @staticmethod
    def of(spec: KernelSpec, kv_dtype: str, columns: int) -> CodeTiling | None:
        """The sizes for pages of a type; None if it is not a codec's."""
        if not spec.codec or kv_dtype != spec.kv_dtype:
            return None
        return CodeTiling(
            codec=spec.codec,
            qk_head_dim=spec.qk_head_dim,
            v_head_dim=spec.v_head_dim,
            columns=columns,
            is_latent=spec.is_latent,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row in a page, K or V."""
        return self.codec.row_bytes(self.qk_head_dim)

    @property
    def v_bytes(self) -> int:
        """Bytes of a row of V in a tile: all, where two codes of a byte are far apart."""
        if self.codec.bits == 4:
            return self.codec.row_bytes(self.v_head_dim)
        return min(self.codec.row_bytes(self.v_head_dim), self.columns)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a thread copies at once; all of them are in one group of scales."""
        return math.gcd(CHUNK_BYTES, self.row_bytes, self.codec.row_bytes(self.v_head_dim))

    @property
    def widened_bytes(self) -> int:
        """Bytes that a thread widens at once: with 4 bits each gives two values."""
        return min(self.copied_bytes, CHUNK_BYTES * self.codec.bits // 8)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Columns of each group of a row that shares a scale."""
        v_width = self.v_head_dim if self.is_latent else self.qk_head_dim
        return self.codec.groups(self.qk_head_dim, v_width)

    @property
    def scale_bits(self) -> int:
        """Bits of a scale."""
        return 32 if self.codec.scale_dtype == "float32" else 16

    @property
    def scale_words(self) -> int:
        """Words that hold the scales of a row, whether or not they begin with a whole word."""
        return -(-len(self.groups) * self.scale_bits // 32)

    @property
    def slot_words(self) -> int:
        """Words of the scales of a position."""
        return self.scale_words * (1 if self.is_latent else 2)

    def k(self, positions: int) -> TileLayout:
        """A tile of codes of K."""
        return self._tile(positions, self.row_bytes)

    def v(self, positions: int) -> TileLayout:
        """A tile of codes of V."""
        return self._tile(positions, self.v_bytes)

    @staticmethod
    def _tile(positions: int, num_bytes: int) -> TileLayout:
        return TileLayout(positions, -(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES, "uint8")

    def stage_bytes(self, positions: int) -> int:
        """Shared memory for the codes and scales of a tile."""
        v_bytes = 0 if self.is_latent else self.v(positions).num_bytes
        return self.k(positions).num_bytes + v_bytes + self.scales_bytes(positions)

    def scales_bytes(self, positions: int) -> int:
        """Shared memory for the scales of a tile."""
        return -(-positions * self.slot_words * WORD_BYTES // CHUNK_BYTES) * CHUNK_BYTES

    @staticmethod
    def row_scales_bytes(positions: int) -> int:
        """Shared memory for the scales of the rows of a widened tile."""
        return positions * ROW_SCALES * WORD_BYTES
