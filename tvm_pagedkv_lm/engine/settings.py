# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the keyword arguments of `generate`, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.config import PrefixCacheConfig
from tvm_pagedkv.transfer import Channel

from ..model.model import DecoderModel
from .parameters import Window

_MAX_NUM_SEQUENCES, _PREFILL_CHUNK_SIZE = 32, 512  # unless a cache holds fewer


@dataclass(frozen=True)
class Settings:
    """The keyword arguments of `generate`."""

    max_total_tokens: int | None
    prefill_chunk_size: int | None
    max_num_sequences: int | None
    window: Window | None
    num_speculative_tokens: int
    on_peak_usage: Callable[[KVCache], None] | None
    kv_transfer_channel: Channel | None
    prefix_cache: bool | PrefixCacheConfig
    cache: KVCache | None
    use_long_rope_factors: bool = False  # whether `cache` was made with `use_long_rope_factors`

    @property
    def reuses_prefixes(self) -> bool:
        """Whether prompts find the pages of earlier texts.

        Texts with a window have no recorded tokens, and another process computes whole prompts.
        """
        has_texts = self.window is None and self.kv_transfer_channel is None
        return bool(self.prefix_cache) and has_texts

    @property
    def tiers(self) -> PrefixCacheConfig | None:
        """The tiers below the pages."""
        return self.prefix_cache if isinstance(self.prefix_cache, PrefixCacheConfig) else None

    def capacities(self) -> tuple[int, int]:
        """Return the rows of a prefill step, and the continuations that run at a time.

        Those that were left open are the defaults, or what the given cache holds if that is less.
        """
        chunk, num_sequences = _PREFILL_CHUNK_SIZE, _MAX_NUM_SEQUENCES
        if self.cache is not None:
            about = cache_description(self.cache)
            num_rows = about["prefill_chunk_size"]
            chunk = min(chunk, num_rows)
            num_texts = num_rows // (1 + self.num_speculative_tokens)
            num_sequences = max(1, min(num_sequences, about["max_num_sequences"], num_texts))
        if self.prefill_chunk_size is not None:
            chunk = self.prefill_chunk_size
        if self.max_num_sequences is not None:
            num_sequences = self.max_num_sequences
        return chunk, num_sequences

    def check(self, model: DecoderModel) -> None:
        """Raise a ValueError if settings do not go together or do not suit the model."""
        if self.window is not None:
            self.window.check(model)
            if self.num_speculative_tokens:
                raise ValueError(
                    "num_speculative_tokens must be 0 with a window, which has no token trees"
                )
        if self.prefill_chunk_size is not None and self.prefill_chunk_size < 1:
            raise ValueError(
                f"prefill_chunk_size must be at least 1, got {self.prefill_chunk_size}"
            )
        if self.cache is not None:
            model.check_cache(self.cache)
        if self.cache is not None and self.max_total_tokens is not None:
            raise ValueError("max_total_tokens must be None with a cache, which has its capacity")
        if self.tiers is not None and not (self.reuses_prefixes and self.cache is None):
            raise ValueError(
                "prefix_cache must not have tiers with a window, a channel or a cache of your own"
            )
        if self.tiers is not None and not isinstance(model, DecoderModel):
            raise ValueError("prefix_cache must not have tiers with several workers")
        if self.kv_transfer_channel is not None and not isinstance(model, DecoderModel):
            raise ValueError("kv_transfer_channel must be None with several workers")
        if self.max_total_tokens is not None and self.max_total_tokens < 1:
            raise ValueError(f"max_total_tokens must be at least 1, got {self.max_total_tokens}")
        if self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens must be 0 or more, got {self.num_speculative_tokens}"
            )
        if self.num_speculative_tokens and not isinstance(model, DecoderModel):
            raise ValueError(
                "num_speculative_tokens must be 0 with several workers, which have no token trees"
            )
        if self.num_speculative_tokens and model.options.budgets:
            raise ValueError(
                "num_speculative_tokens must be 0 with an attention budget: steps with drafts "
                "attend to everything, so the text would depend on them"
            )


def cache_description(cache: KVCache) -> dict[str, Any]:
    """Return what a cache was made from; of the caches of several workers, that of the first."""
    return (cache.first if hasattr(cache, "first") else cache).description
