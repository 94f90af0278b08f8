# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

A tile is some rows of a segment, whatever sequences they belong to.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import view_pages
from ...script import inline, prim_func
from ...semantics.rope import refuse_longrope
from ...signatures.attention import MLA_PREFILL_SHARED, PREFILL_SHARED
from ...signatures.inputs import SharedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..isa.simd import require_half_conversion
from ..rotation import rotation_of
from ..tiles.kv_operands import operands
from ..tiles.kv_tile import POSITIONS
from ..tiles.query_tile import tile_tokens
from .split_tiles import attend


@T.meta_class
class SegmentTiles:
    """The tiles of the segments of a call, one after another: tokens with the heads of a KV head.

    Parameters
    ----------
    spec : KernelSpec
    a : SharedInputs

    Attributes
    ----------
    segment, head, num_tokens, num_rows : int32 expressions
        A token has a row for each query head of the KV head.
    kv_len : int32 expression
        Positions of the segment, all of which the rows see.
    first_page, last_page : int32 expressions
        Its entries of the page table.
    k_offset : int32 expression
        RoPE position of the first one.
    before, cost : int64 expressions
        The cost of the tiles before this one, and its own; see `TileSplits`.
    """

    first_kv_tile = 0

    def __init__(self, spec: KernelSpec, a: SharedInputs):
        self.spec, self.a, self.tile_tokens = spec, a, tile_tokens(spec)
        self.segment, self.kv_len, self.k_offset = (T.local_scalar("int32") for _ in range(3))
        self.first_page, self.last_page = (T.local_scalar("int32") for _ in range(2))
        self.begin_token, self.end_token = (T.local_scalar("int32") for _ in range(2))
        self.head, self.max_tokens = (T.local_scalar("int32") for _ in range(2))
        self.first_token, self.num_tokens = (T.local_scalar("int32") for _ in range(2))
        self.num_rows = T.local_scalar("int32")
        self.before, self.cost = (T.local_scalar("int64") for _ in range(2))

    @inline
    def begin(self):
        """Go to the first tile."""
        self.segment = self.a.first_segment - 1
        self.head = self.spec.num_kv_heads - 1
        self.begin_token = 0
        self.end_token = 0
        self.first_token = 0
        self.num_tokens = 0
        self.before = T.int64(0)
        self.cost = T.int64(0)
        self.advance()

    @property
    def end(self):
        """The first position that no row sees."""
        return self.kv_len

    def has_next(self):
        """Whether there is a tile."""
        return self.segment < self.a.last_segment

    @inline
    def advance(self):
        """Go to the next tile."""
        self.before += self.cost
        self.first_token += self.num_tokens
        if self.first_token == self.end_token:
            self.first_token = self.begin_token
            self.head += 1
        while T.And(self.head == self.spec.num_kv_heads, self.has_next()):
            self.segment += 1
            if self.has_next():
                self._begin_segment()
        self.num_tokens = T.min(self.max_tokens, self.end_token - self.first_token)
        self.num_rows = self.num_tokens * self.spec.group_size
        num_kv_tiles = (self.kv_len + POSITIONS - 1) // POSITIONS
        self.cost = T.cast(num_kv_tiles, "int64") * self.num_tokens

    @inline
    def _begin_segment(self):
        """Go to the first tile of a segment, or to its end if it has no rows."""
        self.begin_token = self.a.row_indptr[self.segment]
        self.end_token = self.a.row_indptr[self.segment + 1]
        self.first_token = self.begin_token
        num_tokens = self.end_token - self.begin_token
        self.head = T.if_then_else(num_tokens > 0, 0, self.spec.num_kv_heads)
        # Tiles of like size: a small last one would pack K and V for few rows.
        num_tiles = T.max((num_tokens + self.tile_tokens - 1) // self.tile_tokens, 1)
        self.max_tokens = (num_tokens + num_tiles - 1) // num_tiles
        self.first_page = self.a.page_indptr[self.segment]
        self.last_page = self.a.page_indptr[self.segment + 1] - 1
        self.kv_len = (self.last_page + 1 - self.first_page) * self.spec.page_size
        if self.a.first_positions is not None:
            self.k_offset = self.a.first_positions[self.segment]
        else:
            self.k_offset = 0

    def token(self, row):
        """The row of Q of a row of the tile."""
        return self.a.row_ids[self.first_token + row // self.spec.group_size]

    def query_head(self, row):
        """The query head of a row of the tile."""
        return self.head * self.spec.group_size + row % self.spec.group_size


def prefill_shared(spec: KernelSpec):
    """Build the kernel `prefill_shared`.

    Rows of several sequences attend to pages that they share, merged into their `o` and `lse`. A
    segment is a range of whole pages with the rows that see all of them: ``row_ids[row_indptr[i]:
    row_indptr[i + 1]]``. In one call a row may belong to one segment at most. With longrope, whose
    frequencies are those of a sequence, rotary_mode 1 is refused.
    """
    return _prefill_shared(spec, PREFILL_SHARED)


def mla_prefill_shared(spec: KernelSpec):
    """Build the kernel `mla_prefill_shared`: over latent rows, which models rotate themselves."""
    return _prefill_shared(spec, MLA_PREFILL_SHARED)


def _prefill_shared(spec: KernelSpec, signature: Signature):
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    ops = operands(spec, spec.kv_dtype)

    @prim_func(arguments=signature.of(spec))
    def prefill_shared(a: SharedInputs):
        T.func_attr(attributes(spec))
        ready = T.meta_var(replace(a, pages=view_pages(a.pages, spec), rope=rotation_of(spec, a)))
        if a.rotary_mode is not None:
            refuse_longrope(spec, a)
        attend(spec, ready, ops, SegmentTiles, lambda: None, merges=True)

    return prefill_shared
