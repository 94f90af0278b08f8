# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads.

It is the skeleton of `prefill` with all heads in the rows of a tile. The latent row is K, and its
first columns are V, so a tile of it is copied once and multiplied twice. A decode step has few
tiles, so as many blocks as the GPU holds take equal splits of their positions. Where blocks may
have much shared memory, tiles have more rows, and fewer of them load the same latent rows.
"""

from __future__ import annotations

from dataclasses import replace

from ...semantics.visibility import CausalMask, WholeSequence
from ...signatures import latent
from ...signatures.inputs import PagedInputs
from ...spec import KernelSpec
from ..components.kv_rows import with_page_views
from ..emit import as_count, index_temp, opaque
from ..splits.tile_schedule import KvSplit, TileSchedule, balanced_splits
from ..tiles.tiling import Tiling
from ..tiles.tiling_choice import emit_chosen
from .balanced_split_tile import BalancedSplitTile, SplitMask, step_of
from .non_finite_v import with_guard
from .tree import build_tree
from .tree_mask import NoTree


class SequenceSchedule(TileSchedule):
    """Splits of tiles whose items are the sequences of a batch.

    Parameters
    ----------
    spec, tiling, num_blocks, lane : see `TileSchedule`
    a : the kernel's arguments `q_indptr`, `page_indptr`, `length_info` and `batch_size`.
    """

    min_kv_tiles = 1  # rows that see nothing are written too

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, num_blocks, lane):
        self.a, self.lengths = a, WholeSequence(spec, a.length_info, index_temp)
        super().__init__(spec, tiling, a.batch_size, num_blocks, lane)

    def kv_len(self, i):
        """Positions of sequence i."""
        num_pages = index_temp(self.a.page_indptr[i + 1] - self.a.page_indptr[i])
        return self.lengths.kv_len(i, num_pages)

    def first_row(self, i):
        """Return where the rows of sequence i begin in Q."""
        return self.a.q_indptr[i]

    def num_rows(self, i):
        """Return the number of rows of sequence i."""
        return self.a.q_indptr[i + 1] - self.a.q_indptr[i]


def emit_mla(spec: KernelSpec, a: PagedInputs) -> None:
    """Emit the body."""
    a = with_page_views(spec, replace(a, tree=NoTree()))
    mask = CausalMask(a.causal)

    def emit_tiles(tiling: Tiling) -> None:
        def attend(split: KvSplit, v_slice, thread) -> None:
            own = replace(a, mask=SplitMask(split.first, split.last, mask))
            step = step_of(spec, a, split, v_slice, split.tile.item)
            with_guard(
                lambda guard: BalancedSplitTile(
                    spec, tiling, own, step, opaque(thread), guard
                ).run(),
                tiling,
            )

        with balanced_splits(spec, a, tiling, SequenceSchedule, is_continued=False) as emit:
            emit(attend)

    num_rows = as_count(a.q.shape[0]) * spec.group_size
    emit_chosen(Tiling.choices(spec, spec.kv_dtype), num_rows, a.batch_size, emit_tiles)


def mla_prefill(spec: KernelSpec):
    """Build the kernel `mla_prefill`; see `signatures.latent.mla_prefill`."""
    return latent.mla_prefill(spec, lambda a: emit_mla(spec, a))


def mla_tree(spec: KernelSpec):
    """Build the kernel `mla_tree`; its arguments are those of `signatures.latent.mla_tree`."""
    return build_tree(spec, latent.mla_tree)
