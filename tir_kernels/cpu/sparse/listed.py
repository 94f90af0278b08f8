# SPDX-License-Identifier: Apache-2.0
"""Attention of rows to lists: the cost grows with the lists, not with the sequences.

A list names positions or blocks of positions. First, positions become slots, and blocks become
page tables. Then every row of Q attends alone: with K and V as in decode, where a list takes the
place of the pages of a sequence; over latent rows, which serve all query heads, with register
tiles.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import view_pages
from ...script import inline, prim_func
from ...semantics.visibility import CausalMask, WholeSequence
from ...signatures.inputs import Elements, PagedInputs
from ...signatures.sparse import ATTEND_BLOCKS, ATTEND_LISTED, ListedInputs
from ...spec import KernelSpec
from ..attention import decode, split_tiles
from ..isa.simd import index_temp, require_half_conversion
from ..rotation import HadamardRotation, NoRotation
from ..rows.products import single_row_operands
from ..tiles.kv_operands import operands
from ..tiles.kv_tile import POSITIONS
from .block_pages import BlockPages
from .listed_rows import ListedLatentRows, ListedRows
from .slot_lists import SlotLists


@T.meta_class
class ListTiles:
    """The tiles of a call over latent rows: rows of Q with all their heads, one after another.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        Whose page table has the slots or the pages of each row of Q.

    Attributes
    ----------
    row : int32 expression
    num_rows : int
        A row of Q is a row for each query head here.
    kv_len, end : int32 expressions
        Positions of the list.
    first_page, last_page : int32 expressions
        The entries of the list.
    before, cost : int64 expressions
        The cost of the tiles before this one, and its own; see `TileSplits`.
    """

    head = 0  # of K and V
    k_offset = 0
    first_kv_tile = 0
    num_tokens = 1

    def __init__(self, spec: KernelSpec, a: PagedInputs):
        self.a, self.num_rows = a, spec.num_qo_heads
        self.row, self.end = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_page, self.last_page = T.local_scalar("int32"), T.local_scalar("int32")
        self.before, self.cost = T.local_scalar("int64"), T.local_scalar("int64")

    @inline
    def begin(self):
        """Go to the first tile."""
        self.row = -1
        self.before = T.int64(0)
        self.cost = T.int64(0)
        self.advance()

    def has_next(self):
        """Whether there is a tile."""
        return self.row < self.a.batch_size

    @inline
    def advance(self):
        """Go to the next tile; one of an empty list costs a KV tile."""
        self.before += self.cost
        self.row += 1
        if self.has_next():
            self.first_page = self.a.page_indptr[self.row]
            self.last_page = self.a.page_indptr[self.row + 1] - 1
            self.end = self.a.sequences.kv_len(self.row, self.last_page + 1 - self.first_page)
        self.cost = T.cast(T.max((self.end + POSITIONS - 1) // POSITIONS, 1), "int64")

    @property
    def kv_len(self):
        """Return the positions of the list."""
        return self.end

    def token(self, row):
        """The row of Q of a row of the tile."""
        return self.row

    def query_head(self, row):
        """The query head of a row of the tile."""
        return row


def attend_listed(spec: KernelSpec):
    """Build the kernel `attend_listed`: rows attend to the positions that they list.

    `positions` are columns of the row's sequence. A row sees none behind its own, so such positions
    and negative ones are left out. One that is listed twice counts twice. The pages hold the rows
    of the call already, and K as it was appended is not rotated again.
    """
    return _attention_to_lists(spec, by_blocks=False)


def attend_blocks(spec: KernelSpec):
    """Build the kernel `attend_blocks`: rows attend to the blocks of positions that they list.

    Each of the C lists of a row is for ``num_kv_heads // C`` KV heads. Block ``i`` has the
    positions from ``i * block_size`` on; `block_size` is a multiple of the page size. Of
    its own block a row sees the positions up to its own. Blocks behind it and negative ones are
    left out; one that is listed twice counts twice, but for the row's own.
    """
    return _attention_to_lists(spec, by_blocks=True)


def _attention_to_lists(spec: KernelSpec, by_blocks: bool):
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    if spec.alibi_slopes is not None:
        raise ValueError("attention to lists has no ALiBi")
    is_latent = spec.is_latent
    ops = operands(spec, spec.kv_dtype) if is_latent else single_row_operands(spec)
    has_hadamard = spec.codec is not None and spec.codec.has_hadamard
    signature = ATTEND_BLOCKS if by_blocks else ATTEND_LISTED

    @prim_func(arguments=signature.of(spec))
    def attend_listed(matched: ListedInputs):
        T.func_attr(attributes(spec))
        a = T.meta_var(replace(matched, mask=CausalMask(1)))
        pages_view = T.meta_var(view_pages(a.pages, spec))
        sequences = T.meta_var(WholeSequence(spec, a.lengths, index_temp))
        rope = T.meta_var(HadamardRotation(spec, a) if has_hadamard else NoRotation())
        whole = T.meta_var(replace(a, sequences=sequences))
        lists = T.meta_var(
            BlockPages(spec, whole, a.blocks, a.block_size, a.blocks.shape)
            if by_blocks
            else SlotLists(spec, whole, a.positions, *a.positions.shape)
        )
        lists.fill()
        nothing = T.meta_var(Elements(lambda _: T.int32(0)))
        ready = T.meta_var(
            replace(
                a,
                batch_size=lists.count,
                pages=pages_view,
                page_indptr=lists.indptr,
                page_ids=lists.values,
                sequences=lists.sequences,
                rope=rope,
                first_positions=nothing,
                query_positions=nothing,
            )
        )
        if is_latent:
            kind = T.meta_var(None if by_blocks else ListedLatentRows)
            split_tiles.attend(spec, ready, ops, ListTiles, lambda: None, False, kind)
        elif by_blocks:
            decode.attend(spec, ready, ops, tables_per_row=a.blocks.shape[1])
        else:
            decode.attend(spec, ready, ops, ListedRows)
        lists.free()

    return attend_listed
