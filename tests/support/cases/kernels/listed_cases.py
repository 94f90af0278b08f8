# SPDX-License-Identifier: Apache-2.0
"""Batches whose rows attend to lists of positions or of blocks; what no row lists is NaN."""

from __future__ import annotations

import functools

import numpy as np

from tir_kernels.spec import KernelSpec

from .... import reference
from ....reference.listed import (
    attention_by_heads,
    expand_blocks,
    listed_latent_attention,
    listed_positions,
)
from .attention_cases import PagedBatch, compiled, pool_of
from .mla_cases import LatentBatch


@functools.cache
def listed_case(case: type) -> type:
    """The class of batches like `case`, whose rows list `width` positions each.

    Lists are in no order. They have holes, positions behind their rows, and repeated ones; one in
    six is empty.
    """

    class ListedCase(case):
        kernel, sizes = "attend_listed", ()  # scalars behind the scale

        def __init__(self, spec: KernelSpec, lengths, seed: int, *lists: int):
            super().__init__(spec, lengths, seed)
            self.owns = [
                own
                for n, kv in zip(self.num_rows, self.kv_lens, strict=True)
                for own in range(kv - n, kv)
            ]
            self.positions = self.make_lists(*lists)
            self._forget_unlisted()

        def make_lists(self, width: int) -> np.ndarray:
            """Make the lists of the kernel's call, and return them ``[T, lists, width]``."""
            rng, lists = self.rng, []
            for n, kv in zip(self.num_rows, self.kv_lens, strict=True):
                for _ in range(n):
                    row = rng.integers(-1 - kv // 8, kv + 2, width)
                    lists.append(np.full(width, -1) if rng.random() < 1 / 6 else row)
            self.listed = np.array(lists, np.int32).reshape(len(lists), width)
            return self.listed[:, None]

        def sequence_slots(self, b: int) -> np.ndarray:
            page_ids = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
            return reference.sequence_slots(page_ids, self.last_page_len[b], self.spec.page_size)

        def rows_of(self, b: int) -> range:
            return range(self.query_indptr[b], self.query_indptr[b + 1])

        def _forget_unlisted(self) -> None:
            """Let what no row sees be NaN."""
            page = self.spec.page_size
            for b in range(len(self.num_rows)):
                slots = self.sequence_slots(b)
                seen = [
                    listed_positions(listed, self.owns[r])
                    for r in self.rows_of(b)
                    for listed in self.positions[r]
                ]
                hidden = np.setdiff1d(np.arange(len(slots)), np.concatenate([[], *seen]))
                at = slots[hidden.astype(int)]
                if self.pages.ndim == 3:
                    self.pages[at // page, at % page] = np.nan
                else:
                    self.pages[at // page, :, :, at % page] = np.nan

        def run(self, cpu: str = "native") -> None:
            """Run the kernel."""
            pages = self.tensor(pool_of(self.spec, self.pages))
            table = (self.page_indptr, self.page_ids, self.last_page_len, self.listed)
            compiled(self.kernel, self.spec, cpu)(
                *(self.tensor(self.q), self.tensor(self.query_indptr), pages),
                *(self.tensor(x) for x in table),
                *(self.o, self.lse, self.sm_scale, *self.sizes, *self.last_arguments()),
            )

        def expected(self):
            """Return the reference's `(o, lse)`."""
            outputs = []
            for b in range(len(self.num_rows)):
                rows, slots = list(self.rows_of(b)), self.sequence_slots(b)
                if not rows:
                    continue
                lists, owns = self.positions[rows], [self.owns[r] for r in rows]
                how = (lists, owns, self.sm_scale)
                if self.pages.ndim == 3:
                    page = self.spec.page_size
                    latent = self.pages[slots // page, slots % page]
                    width = self.spec.v_head_dim
                    how = (lists[:, 0], *how[1:])
                    part = listed_latent_attention(self.q[rows], latent, width, *how)
                else:
                    k, v = reference.gather_slots(self.pages, slots)
                    part = attention_by_heads(self.q[rows], k, v, *how, self.spec.logit_softcap)
                outputs.append(part)
            o, lse = zip(*outputs, strict=True)
            return np.concatenate(o), np.concatenate(lse)

    ListedCase.__name__ = f"Listed{case.__name__}"
    return ListedCase


@functools.cache
def block_case(case: type) -> type:
    """The class of batches like `case`, whose rows have lists of blocks.

    A list has `width` blocks at most, and holes, in no order; those of a row name its own block or
    not, and blocks behind it. One in six is empty.
    """

    class BlockCase(listed_case(case)):
        kernel = "attend_blocks"

        def make_lists(self, width: int, block_size: int, num_lists: int = 1) -> np.ndarray:
            self.sizes = (block_size,)
            lists = np.full((len(self.owns), num_lists, width), -1, np.int32)
            for row, own in enumerate(self.owns):
                for i in range(num_lists if self.rng.random() > 1 / 6 else 0):
                    blocks = self.rng.permutation(np.arange(-width // 4, own // block_size + 2))
                    lists[row, i, : len(blocks)] = blocks[:width]
            self.listed = lists
            return expand_blocks(lists, block_size, self.owns)

    BlockCase.__name__ = f"Block{case.__name__}"
    return BlockCase


ListedPagedBatch, ListedLatentBatch = listed_case(PagedBatch), listed_case(LatentBatch)
BlockPagedBatch, BlockLatentBatch = block_case(PagedBatch), block_case(LatentBatch)
