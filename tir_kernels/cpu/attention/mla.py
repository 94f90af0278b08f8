# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads."""

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import view_pages
from ...script import inline, prim_func
from ...semantics.visibility import CausalMask, mask_of
from ...signatures.attention import MLA_PREFILL, MLA_PREFILL_SLIDING, MLA_TREE, MLA_TREE_SLIDING
from ...signatures.inputs import PagedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..isa.simd import require_half_conversion
from ..rotation import rotation_of
from ..tiles.kv_operands import operands
from ..tiles.kv_tile import POSITIONS
from ..tiles.query_tile import tile_tokens
from ..tiles.tree_mask import TokenTrees, TreeMask
from .split_tiles import attend


@T.meta_class
class SequenceTiles:
    """The tiles of a batch, one after another: tokens of a sequence with all their heads.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs

    Attributes
    ----------
    sequence, num_tokens, num_rows : int32 expressions
        A token has a row for each query head.
    kv_len, end : int32 expressions
        Positions of the sequence, and the first one that no token sees.
    first_page, last_page : int32 expressions
        The entries of the sequence in the page table.
    first_kv_tile : int32 expression
        The KV tile that the first token begins to see in.
    before, cost : int64 expressions
        The cost of the tiles before this one, and its own; see `TileSplits`. One that sees nothing
        costs one KV tile.
    """

    head = 0  # of K and V
    k_offset = 0

    def __init__(self, spec: KernelSpec, a: PagedInputs):
        self.spec, self.a, self.tile_tokens = spec, a, tile_tokens(spec)
        self.mask = a.mask
        self.sequence, self.kv_len, self.end = (T.local_scalar("int32") for _ in range(3))
        self.first_page, self.last_page = (T.local_scalar("int32") for _ in range(2))
        self.first_row, self.num_sequence_rows = (T.local_scalar("int32") for _ in range(2))
        self.first_token, self.num_tokens = (T.local_scalar("int32") for _ in range(2))
        self.num_rows, self.max_tokens = (T.local_scalar("int32") for _ in range(2))
        self.first_kv_tile = T.local_scalar("int32") if self.mask.has_window else 0
        self.before, self.cost = (T.local_scalar("int64") for _ in range(2))

    @inline
    def begin(self):
        """Go to the first tile."""
        self.sequence = -1
        self.num_sequence_rows = 0
        self.first_token = 0
        self.num_tokens = 0
        self.before = T.int64(0)
        self.cost = T.int64(0)
        self.advance()

    def has_next(self):
        """Whether there is a tile."""
        return self.sequence < self.a.batch_size

    @inline
    def advance(self):
        """Go to the next tile."""
        self.before += self.cost
        self.first_token += self.num_tokens
        while T.And(self.first_token == self.num_sequence_rows, self.has_next()):
            self.sequence += 1
            self.first_token = 0
            if self.has_next():
                self._begin_sequence()
        self.num_tokens = T.min(self.max_tokens, self.num_sequence_rows - self.first_token)
        self.num_rows = self.num_tokens * self.spec.num_qo_heads
        self.end = self.end_of(self.num_rows - 1)
        if self.mask.has_window:
            self.first_kv_tile = T.min(self.begin_of(0), self.end) // POSITIONS
        num_kv_tiles = T.max((self.end + POSITIONS - 1) // POSITIONS - self.first_kv_tile, 1)
        self.cost = T.cast(num_kv_tiles, "int64") * self.num_tokens

    @inline
    def _begin_sequence(self):
        self.first_row = self.a.query_indptr[self.sequence]
        self.num_sequence_rows = self.a.query_indptr[self.sequence + 1] - self.first_row
        num_tiles = T.max((self.num_sequence_rows + self.tile_tokens - 1) // self.tile_tokens, 1)
        self.max_tokens = (self.num_sequence_rows + num_tiles - 1) // num_tiles  # of like size
        self.first_page = self.a.page_indptr[self.sequence]
        self.last_page = self.a.page_indptr[self.sequence + 1] - 1
        num_pages = self.last_page - self.first_page + 1
        held = (num_pages - 1) * self.spec.page_size + self.a.lengths[self.sequence]
        self.kv_len = T.if_then_else(num_pages > 0, held, 0)

    def end_of(self, row):
        """The first position that a row of the tile does not see."""
        token = self.first_token + row // self.spec.num_qo_heads
        return self.mask.end(token, self.num_sequence_rows, self.kv_len)

    def begin_of(self, row):
        """The first position that a row of the tile sees, where the mask has a window."""
        token = self.first_token + row // self.spec.num_qo_heads
        return self.mask.begin(token, self.num_sequence_rows, self.kv_len)

    def own(self, row):
        """The column of a row of the tile itself."""
        token = self.first_token + row // self.spec.num_qo_heads
        return self.mask.own(token, self.num_sequence_rows, self.kv_len)

    def token(self, row):
        """The row of Q of a row of the tile."""
        return self.first_row + self.first_token + row // self.spec.num_qo_heads

    def query_head(self, row):
        """The query head of a row of the tile."""
        return row % self.spec.num_qo_heads


def mla_prefill(spec: KernelSpec, mask: type = CausalMask):
    """Build the kernel `mla_prefill`: any number of rows per sequence attend to its pages.

    The spec is of kind "mla". `mask` is a class of masks without a window, made of `causal`.
    """
    if mask.has_window:
        raise ValueError(f"the kernel takes no window, but {mask.__name__} has one")
    return _mla_prefill(spec, MLA_PREFILL, lambda a: mask(a.causal))


def mla_prefill_sliding(spec: KernelSpec):
    """Build `mla_prefill` of layers with a window: a row sees the last `window` positions.

    Its own position is one of them. The rows of a sequence are the last positions of its pages, or
    follow them where `causal` is 0. Columns are counted from the first slot of the page table,
    which may begin anywhere in the sequence.
    """
    return _mla_prefill(spec, MLA_PREFILL_SLIDING, mask_of)


def mla_tree(spec: KernelSpec):
    """Build the kernel `mla_tree`: new nodes of token trees see their ancestors and themselves."""
    return _mla_prefill(spec, MLA_TREE, _causal_mask)


def mla_tree_sliding(spec: KernelSpec):
    """Build `mla_tree` of layers with a window; rows see what they see in `tree_paged_sliding`."""
    return _mla_prefill(spec, MLA_TREE_SLIDING, _causal_mask)


def _causal_mask(a: PagedInputs) -> CausalMask:
    """Return the bounds of tree nodes; `TreeMask` knows more."""
    return CausalMask(T.int32(1))


def _mla_prefill(spec: KernelSpec, signature: Signature, make_bounds: Callable):
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    ops = operands(spec, spec.kv_dtype)

    @prim_func(arguments=signature.of(spec))
    def mla_prefill(matched: PagedInputs):
        T.func_attr(attributes(spec))
        a = T.meta_var(replace(matched, mask=make_bounds(matched)))
        ready = T.meta_var(replace(a, pages=view_pages(a.pages, spec), rope=rotation_of(spec, a)))
        trees = T.meta_var(None if a.tree_order is None else TokenTrees(spec, a))
        if trees is not None:
            trees.begin()
        make_mask = T.meta_var(lambda: a.mask if trees is None else TreeMask(a, trees, POSITIONS))
        attend(spec, ready, ops, SequenceTiles, make_mask, merges=False)

    return mla_prefill
