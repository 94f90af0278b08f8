# SPDX-License-Identifier: Apache-2.0
"""`ResolvedConfig`: the values that the kernels and the memory of a cache are made from."""

from __future__ import annotations

from dataclasses import dataclass

from .resolved_layer import ResolvedLayer

POPPABLE = 16  # positions that a layer with a window keeps beyond the window of its next row


@dataclass(frozen=True)
class ResolvedConfig:
    """A `KVCacheConfig` with a value for each field that it left None.

    `KVCacheConfig.resolved` makes it. Configurations that mean the same resolve to equal ones.
    The fields are those of `KVCacheConfig`; what layers can have of their own is in `layers` only.
    """

    layers: tuple[ResolvedLayer, ...]
    dtype: str
    kv_dtype: str
    page_size: int
    max_num_sequences: int
    max_total_tokens: int
    prefill_chunk_size: int
    sliding_window: bool
    sliding_window_includes_self: bool
    logit_softcap: float | None
    share_prefix: bool
    enable_kv_transfer: bool
    layer_indptr: tuple[int, ...]
    stage: int | None

    def refuse_states(self) -> None:
        """Raise a NotImplementedError for layers with a state, which no cache keeps yet."""
        for index, layer in enumerate(self.layers):
            if layer.recurrent is not None or layer.conv is not None:
                raise NotImplementedError(
                    f"layer {index} is of kind {layer.kind!r}, which caches do not keep yet"
                )

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool of layers without a window."""
        return -(-self.max_total_tokens // self.page_size)

    def num_pages_of(self, layer: ResolvedLayer) -> int:
        """Return the number of pages in the pool of `layer`: at most what it can ever need."""
        if not layer.keeps_kv:
            return 0
        if layer.window is None:
            return self.num_pages
        # Pages that a sequence keeps between steps, for any offset in a page, and pages of a step.
        pages_kept = (layer.window - 1 + POPPABLE + self.page_size - 2) // self.page_size + 1
        batch_size = min(self.max_num_sequences, self.prefill_chunk_size)
        pages_added = (self.prefill_chunk_size - batch_size) // self.page_size + batch_size
        return min(self.num_pages, self.max_num_sequences * pages_kept + pages_added)
