# SPDX-License-Identifier: Apache-2.0
"""Batched generation: prompts in, a stream of events out.

A prompt is admitted when enough pages are guaranteed to it and its continuations. It is prefilled
in chunks and forked for each continuation. Then all running continuations advance together, by one
token per step or by the accepted tokens of their drafts.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.config import PrefixCacheConfig
from tvm_pagedkv.transfer import Channel

from ..model.model import DecoderModel
from .batch import Batch
from .decode import Decode
from .disaggregated import RemotePrefill
from .events import FinishedEvent, Statistics, TextEvent
from .page_budget import PageBudget
from .parameters import SamplingParams, Window, encode_prompt
from .prefill import Prefill
from .settings import Settings, cache_description

_log = logging.getLogger("tvm_pagedkv_lm")


def generate(
    model: DecoderModel,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | None = None,
    *,
    max_total_tokens: int | None = None,
    prefill_chunk_size: int | None = None,
    max_num_sequences: int | None = None,
    window: Window | None = None,
    num_speculative_tokens: int = 0,
    on_peak_usage: Callable[[KVCache], None] | None = None,
    kv_transfer_channel: Channel | None = None,
    prefix_cache: bool | PrefixCacheConfig = True,
    cache: KVCache | None = None,
) -> Iterator[TextEvent | FinishedEvent | Statistics]:
    """Continue prompts.

    Parameters
    ----------
    model : DecoderModel or ParallelModel
    prompts : sequence of str or of token ids
    params : SamplingParams, optional
        None: those that the makers of the model recommend.
    max_total_tokens : int, optional
        Capacity of the cache; None: enough for the largest possible batch.
    prefill_chunk_size : int, optional
        Maximum number of rows of a prefill step. Longer prompts take several steps. None: 512, or
        what the given `cache` holds if that is less.
    max_num_sequences : int, optional
        Maximum number of continuations that run at a time; it is raised to `params.n`. None: 32, or
        what the given `cache` holds if that is less.
    window : Window, optional
        Sliding window of every text, which may then be longer than the model's context. The model
        must have been loaded with ``sliding_window``.
    num_speculative_tokens : int
        Maximum number of tokens that a step drafts per continuation and verifies; 0: none. The text
        is the same, except that near-ties may resolve differently, because kernels for one row and
        for several rows round differently.
    on_peak_usage : callable, optional
        Called with the cache whenever more pages are in use than before.
    kv_transfer_channel : Channel, optional
        A channel to `serve_prefill`, which computes the prompts. It is closed at the end, or by an
        error. None: the prompts are computed here.
    prefix_cache : bool or PrefixCacheConfig
        Whether prompts reuse the pages of texts that begin with the same tokens, of this call and
        of earlier ones with the same `cache`. Texts with a `window` and prompts that come through a
        channel never do. With a configuration, texts of earlier processes are found, too: in the
        tiers that it names.
    cache : KVCache or ParallelCache, optional
        A cache from `model.create_cache`, for several calls in turn. None: a cache for this call.
        Models that were loaded from the same weights in the same types may share it.

    Yields
    ------
    TextEvent, FinishedEvent
        As tokens are generated.
    Statistics
        The last event.

    Raises
    ------
    ValueError
        If a prompt is empty, longer than the model's context, or too long for the cache with its
        continuations, or if arguments do not go together. It is raised before any computation.
    """
    settings = Settings(
        max_total_tokens,
        prefill_chunk_size,
        max_num_sequences,
        window,
        num_speculative_tokens,
        on_peak_usage,
        kv_transfer_channel,
        prefix_cache,
        cache,
    )
    try:
        ids = [encode_prompt(model, i, prompt, window is None) for i, prompt in enumerate(prompts)]
        params = params or SamplingParams.for_model(model)
        are_texts = [isinstance(prompt, str) for prompt in prompts]
        run = Run(model, ids, params, settings, are_texts)
    except BaseException:
        if kv_transfer_channel is not None:
            kv_transfer_channel.close()
        raise
    events = run.events()
    if run.remote is not None:
        weakref.finalize(events, run.remote.close)  # also if nobody asks for an event
    return events


class Run:
    """The state of one call of `generate`.

    Parameters
    ----------
    model : DecoderModel
    prompts : list of token ids
    params : SamplingParams
    settings : Settings
    continues_text : sequence of bool, optional
        As for `Batch`.

    Raises
    ------
    ValueError
        If settings do not go together, or a prompt does not fit.
    """

    def __init__(
        self,
        model: DecoderModel,
        prompts: list[list[int]],
        params: SamplingParams,
        settings: Settings,
        continues_text: Sequence[bool] | None = None,
    ) -> None:
        settings.check(model)
        chunk, num_slots = settings.capacities()
        page_size, num_slots = model.options.page_size, max(num_slots, params.n)
        budget = PageBudget(
            page_size,
            model.config.context_length,
            chunk,
            params,
            settings.window,
            settings.num_speculative_tokens,
        )
        has_long_texts = _has_long_texts(model, prompts, budget, settings)
        channel = settings.kv_transfer_channel
        if settings.cache is not None:
            cache = settings.cache
            num_pages = _check_cache(cache, prompts, num_slots, budget)
        else:
            # A cache of hybrids has states for each sequence that may run.
            num_slots = max(1, min(num_slots, len(prompts) * params.n))
            num_pages = _num_pages(prompts, num_slots, budget, settings)
            num_rows = max(chunk, num_slots * (1 + settings.num_speculative_tokens))
            capacities = num_slots, num_pages * page_size, num_rows
            tiers: Any = {} if settings.tiers is None else {"prefix_cache": settings.tiers}
            cache = model.create_cache(*capacities, use_long_rope_factors=has_long_texts, **tiers)
        self.owns_cache, self.has_tiers = settings.cache is None, settings.tiers is not None
        self.remote = RemotePrefill(model, cache, channel) if channel else None
        self.batch = Batch(
            model,
            cache,
            prompts,
            params,
            budget,
            settings.reuses_prefixes,
            settings.on_peak_usage,
            continues_text,
        )
        self.batch.statistics.pages_total = num_pages
        self.prefill = Prefill(self.batch, settings, num_slots, num_pages, self.remote)
        self.decode = Decode(self.batch, settings.window, settings.num_speculative_tokens)

    def events(self) -> Generator[TextEvent | FinishedEvent | Statistics, None, None]:
        """Run all prompts to the end."""
        before = self.batch.reused_by_tier()
        try:
            while self.prefill.waiting or self.batch.running:
                started = self.prefill.admit()
                for continuation, logits in started:
                    yield from self.batch.advance(continuation, logits)
                self.batch.remove_finished()
                if not started:
                    yield from self.decode.step()
            self._count_tiers(before)
            yield self.batch.statistics
        finally:
            if self.remote is not None:
                self.remote.close()
            self._count_tiers(before)
            if not self.owns_cache or self.has_tiers:
                self._remove_sequences()
            if self.has_tiers and not self.batch.cache.close_prefixes():
                _log.warning("the store did not take all pages in time")

    def _count_tiers(self, before: dict[str, int]) -> None:
        """Note what this run has reused of each tier."""
        now = self.batch.reused_by_tier()
        tiers = {tier: count - before.get(tier, 0) for tier, count in now.items()}
        self.batch.statistics.reused_by_tier = tiers

    def _remove_sequences(self) -> None:
        """Leave the caller's cache as it was, but for what can be found in it."""
        cache = self.batch.cache
        if isinstance(cache, KVCache) and cache.is_in_forward:  # an interrupt at its beginning
            cache.abort_forward()
        self.prefill.close()
        self.batch.close()


def _num_pages(
    prompts: Sequence[Sequence[int]], num_slots: int, budget: PageBudget, settings: Settings
) -> int:
    """Return the pages of a cache for these prompts."""
    max_total_tokens = settings.max_total_tokens
    if max_total_tokens is None:
        return budget.num_pages(prompts, num_slots)
    num_pages = -(-max_total_tokens // budget.page_size)
    budget.check(prompts, num_pages, f"max_total_tokens {max_total_tokens}")
    return num_pages


def _check_cache(
    cache: KVCache, prompts: Sequence[Sequence[int]], num_slots: int, budget: PageBudget
) -> int:
    """Check the capacities of a cache that the caller gave; return its pages."""
    info = cache_description(cache)
    num_rows = max(budget.prefill_chunk_size, num_slots * (1 + budget.max_drafts))
    for name, minimum in (("max_num_sequences", num_slots), ("prefill_chunk_size", num_rows)):
        if info[name] < minimum:
            raise ValueError(
                f"the cache must have a {name} of at least {minimum} for these arguments, got "
                f"{info[name]}"
            )
    if info["page_size"] != budget.page_size:
        raise ValueError(
            f"the cache must have the model's page_size, {budget.page_size}, got "
            f"{info['page_size']}"
        )
    num_pages = -(-info["max_total_tokens"] // budget.page_size)
    num_held = max((g["num_used_pages"] for g in cache.stats()["groups"]), default=0)
    budget.check(prompts, num_pages - num_held, "the cache without its sequences")
    return num_pages


def _has_long_texts(
    model: DecoderModel,
    prompts: Sequence[Sequence[int]],
    budget: PageBudget,
    settings: Settings,
) -> bool:
    """Return whether a text may exceed the length up to which longrope uses short factors."""
    limit = model.config.short_text
    if limit is None or all(len(p) + budget.max_new_tokens(p) <= limit for p in prompts):
        return False
    if settings.kv_transfer_channel is not None:
        raise ValueError(
            f"a prompt and its continuation may be longer than {limit} tokens, beyond which a "
            "longrope model rotates K by other factors than the other end does; ask for fewer "
            "(max_tokens)"
        )
    if settings.cache is not None and not settings.use_long_rope_factors:
        raise ValueError(
            f"a prompt and its continuation may be longer than {limit} tokens, beyond which a "
            "longrope model rotates K by other factors than those in the cache; ask for fewer "
            "(max_tokens)"
        )
    return True
