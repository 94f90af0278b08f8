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
    spans: bool
    share_prefix: bool
    enable_kv_transfer: bool
    layer_indptr: tuple[int, ...]
    stage: int | None

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool of layers without a window."""
        return -(-self.max_total_tokens // self.page_size)

    def num_pages_of(self, layer: ResolvedLayer) -> int:
        """Return the number of pages in the pool of `layer`: at most what it can ever need."""
        if not layer.keeps_kv:
            return 0
        return self.num_pages if layer.window is None else self._pages_of_window(layer.window)

    def num_ingredient_pages_of(self, layer: ResolvedLayer) -> int:
        """Return the number of pages for the ingredients of a recurrent layer."""
        if layer.recurrent is None:
            return 0
        return self._pages_with_history(layer, self.interval_of(layer))

    def num_conv_pages_of(self, layer: ResolvedLayer) -> int:
        """Return the number of pages for rows of the layer's short convolution."""
        return 0 if layer.conv is None else self._pages_with_history(layer, layer.conv.width)

    def interval_of(self, layer: ResolvedLayer) -> int:
        """Return the positions from one kept state of a recurrent layer to the next."""
        assert layer.recurrent is not None
        return layer.recurrent.interval(self.dtype, self.page_size)

    def num_states_of(self, layer: ResolvedLayer) -> int:
        """Return the number of pages for states of a recurrent layer, each for all its heads.

        A sequence holds up to three between steps, and a step takes one for every interval of its
        rows. The others keep the states of earlier text.
        """
        interval = self.interval_of(layer)
        num_sequences = min(self.max_num_sequences, self.max_total_tokens)
        in_step = min(num_sequences, self.prefill_chunk_size) + self.prefill_chunk_size // interval
        return 3 * num_sequences + in_step + -(-self.max_total_tokens // interval)

    def _pages_with_history(self, layer: ResolvedLayer, window: int) -> int:
        history = None if layer.recurrent is None else layer.recurrent.history_tokens
        # A sequence with a window may need more rows than it has positions: the text is longer.
        needed = self._pages_in_use(window)
        smallest = needed if self.sliding_window else 0
        if history is None:
            return max(self.num_pages, smallest)
        return max(min(self.num_pages, needed + -(-history // self.page_size)), smallest)

    def _pages_of_window(self, window: int) -> int:
        return min(self.num_pages, self._pages_in_use(window))

    def _pages_in_use(self, window: int) -> int:
        # Pages that a sequence keeps between steps, for any offset in a page, and pages of a step.
        pages_kept = (window - 1 + POPPABLE + self.page_size - 2) // self.page_size + 1
        batch_size = min(self.max_num_sequences, self.prefill_chunk_size)
        pages_added = (self.prefill_chunk_size - batch_size) // self.page_size + batch_size
        return self.max_num_sequences * pages_kept + pages_added
