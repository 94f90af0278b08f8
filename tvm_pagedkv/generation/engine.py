# SPDX-License-Identifier: Apache-2.0
"""Batched generation: prompts in, a stream of events out.

A prompt is admitted when enough pages are guaranteed to it and its continuations. It is prefilled
in chunks and forked for each continuation. Then all running continuations advance together, by one
token per step or by the accepted tokens of their drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers.decoders import DecodeStream

from .._deprecation import renamed_arguments
from ..cache import KVCache
from ..config import ITEMSIZE
from ..models import DecoderModel, Work
from ..transfer import Channel
from .disaggregated import RemotePrefill
from .events import FinishedEvent, Statistics, TextEvent
from .page_budget import PageBudget
from .parameters import SamplingParams, Window, encode_prompt, sample
from .speculative import Draft, HitRates, PromptLookup


@dataclass(eq=False)
class _Continuation:
    prompt: int
    index: int
    seq_id: int
    random: np.random.Generator
    lookup: PromptLookup | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stream: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))


@renamed_arguments(prefill_channel="kv_transfer_channel")
def generate(
    model: DecoderModel,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | None = None,
    *,
    max_total_tokens: int | None = None,
    prefill_chunk_size: int = 512,
    max_num_sequences: int = 32,
    window: Window | None = None,
    speculative: int = 0,
    at_fullest: Callable[[KVCache], None] | None = None,
    kv_transfer_channel: Channel | None = None,
) -> Iterator[TextEvent | FinishedEvent | Statistics]:
    """Continue prompts.

    Parameters
    ----------
    model : DecoderModel or ParallelModel
    prompts : sequence of str or of token ids
    params : SamplingParams, optional
    max_total_tokens : int, optional
        Capacity of the cache; None: enough for the largest possible batch.
    prefill_chunk_size : int
        Maximum number of rows of a prefill step. Longer prompts take several steps.
    max_num_sequences : int
        Maximum number of continuations that run at a time; it is raised to `params.n`.
    window : Window, optional
        Sliding window of every text, which may then be longer than the model's context. The model
        must have been loaded with ``sliding_window``.
    speculative : int
        Maximum number of tokens that a step drafts per continuation and verifies; 0: none. The text
        is the same, except that near-ties may resolve differently, because kernels for one row and
        for several rows round differently.
    at_fullest : callable, optional
        Called with the cache whenever more pages are in use than before.
    kv_transfer_channel : Channel, optional
        A channel to `serve_prefill`, which computes the prompts. It is closed at the end. None: the
        prompts are computed here.

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
    settings = _Settings(
        max_total_tokens,
        prefill_chunk_size,
        max_num_sequences,
        window,
        speculative,
        at_fullest,
        kv_transfer_channel,
    )
    encoded = [encode_prompt(model, i, prompt, window is None) for i, prompt in enumerate(prompts)]
    return _Run(model, encoded, params or SamplingParams(), settings).events()


@dataclass(frozen=True)
class _Settings:
    """The keyword arguments of `generate`."""

    max_total_tokens: int | None
    prefill_chunk_size: int
    max_num_sequences: int
    window: Window | None
    speculative: int
    at_fullest: Callable[[KVCache], None] | None
    kv_transfer_channel: Channel | None

    def check(self, model: DecoderModel) -> None:
        """Raise a ValueError if settings do not go together or do not suit the model."""
        if self.window is not None:
            self.window.check(model)
            if self.speculative:
                raise ValueError("speculative must be 0 with a window, which has no token trees")
        if self.prefill_chunk_size < 1:
            raise ValueError(
                f"prefill_chunk_size must be at least 1, got {self.prefill_chunk_size}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < 1:
            raise ValueError(f"max_total_tokens must be at least 1, got {self.max_total_tokens}")
        if self.speculative < 0:
            raise ValueError(f"speculative must be 0 or more, got {self.speculative}")
        if self.speculative and not isinstance(model, DecoderModel):
            raise ValueError(
                "speculative must be 0 with several workers, which have no token trees"
            )


class _Run:
    """The state of one call of `generate`.

    Parameters
    ----------
    model : DecoderModel
    prompts : list of token ids
    params : SamplingParams
    settings : _Settings
    """

    def __init__(
        self,
        model: DecoderModel,
        prompts: list[list[int]],
        params: SamplingParams,
        settings: _Settings,
    ) -> None:
        settings.check(model)
        self.model, self.prompts, self.params = model, prompts, params
        self.window, self.at_fullest = settings.window, settings.at_fullest
        self.chunk, self.page_size = settings.prefill_chunk_size, model.options.page_size
        self.num_slots = max(settings.max_num_sequences, params.n)
        self.max_drafts, self.rates = settings.speculative, HitRates()
        self.budget = PageBudget(
            self.page_size,
            model.config.context_length,
            self.chunk,
            params,
            self.window,
            self.max_drafts,
        )
        self.num_pages = self.budget.num_pages(prompts, self.num_slots, settings.max_total_tokens)
        channel = settings.kv_transfer_channel
        self.cache: KVCache = model.create_cache(
            self.num_slots,
            self.num_pages * self.page_size,
            max(self.chunk, self.num_slots * (1 + self.max_drafts)),
            long_texts=self._has_long_texts(channel),
        )
        self.remote = RemotePrefill(self.cache, channel) if channel else None
        options = model.options
        self.work = Work(model.config, ITEMSIZE[options.dtype], options.kv_dtype)
        self.statistics = Statistics(pages_total=self.num_pages, page_size=self.page_size)
        self.waiting = deque(range(len(prompts)))
        self.running: list[_Continuation] = []
        self.reserved = 0
        self.next_id = 0

    def events(self) -> Iterator[TextEvent | FinishedEvent | Statistics]:
        """Run all prompts to the end."""
        try:
            while self.waiting or self.running:
                started, logits = self._admit()
                for continuation, row in zip(started, logits, strict=True):
                    yield from self._advance(continuation, row)
                if not started:
                    yield from self._decode()
            yield self.statistics
        finally:
            if self.remote is not None:
                self.remote.close()

    def _has_long_texts(self, kv_transfer_channel: Channel | None) -> bool:
        """Return whether a text may exceed the length up to which longrope uses short factors."""
        limit = self.model.config.short_text
        if limit is None or all(
            len(p) + self.budget.max_new_tokens(p) <= limit for p in self.prompts
        ):
            return False
        if kv_transfer_channel is not None:
            raise ValueError(
                f"a prompt and its continuation may be longer than {limit} tokens, beyond which a "
                "longrope model rotates K by other factors than the other end does; ask for fewer "
                "(max_tokens)"
            )
        return True

    # --- steps ----------------------------------------------------------------------------------

    def _admit(self) -> tuple[list[_Continuation], list[np.ndarray]]:
        """Admit the waiting prompts that fit: prefill each once, then fork its continuations."""
        batch: list[tuple[int, int]] = []
        while self.waiting:
            need = self.budget.pages_of_prompt(self.prompts[self.waiting[0]])
            num_running = len(self.running) + (len(batch) + 1) * self.params.n
            room = self.num_pages - self.budget.pages_of_step()
            if num_running > self.num_slots or self.reserved + need > room:
                break
            self.reserved += need
            self.cache.add_sequence(self.next_id)
            self._enable_window(self.next_id)
            batch.append((self.waiting.popleft(), self.next_id))
            self.next_id += 1
        if not batch:
            return [], []
        rows = self._prefill(batch)
        started, logits = [], []
        for prompt, seq_id in batch:
            for index in range(self.params.n):
                child = seq_id
                if index:
                    child = self.next_id
                    self.next_id += 1
                    self.cache.fork_sequence(seq_id, child)
                    self._enable_window(child)
                random = np.random.default_rng([self.params.seed, index])
                lookup = None
                if self.max_drafts:
                    lookup = PromptLookup(self.prompts[prompt], self.rates)
                started.append(_Continuation(prompt, index, child, random, lookup))
                logits.append(rows[prompt])
        self.running += started
        self._note_pages()
        return started, logits

    def _enable_window(self, seq_id: int) -> None:
        if self.window is not None:
            self.cache.enable_sliding_window(seq_id, self.window.size, self.window.sinks)

    def _prefill(self, batch: list[tuple[int, int]]) -> dict[int, np.ndarray]:
        """Append prompts in steps of at most `chunk` rows; return the last logits of each."""
        start = time.perf_counter()
        if self.remote is not None:
            rows = self.remote.prefill([(seq_id, self.prompts[i]) for i, seq_id in batch])
            self.statistics.prefill_tokens += sum(len(self.prompts[i]) for i, _ in batch)
            self.statistics.prefill_seconds += time.perf_counter() - start
            return {prompt: row for (prompt, _), row in zip(batch, rows, strict=True)}
        queue = deque((prompt, seq_id, 0) for prompt, seq_id in batch)
        logits: dict[int, np.ndarray] = {}
        done: dict[int, int] = {}
        while queue:
            step, room = [], self.chunk
            while queue and room:
                prompt, seq_id, begin = queue.popleft()
                part = self.prompts[prompt][begin : begin + room]
                room -= len(part)
                step.append((prompt, seq_id, part))
                if begin + len(part) < len(self.prompts[prompt]):
                    queue.appendleft((prompt, seq_id, begin + len(part)))
                    break
            prompts, seq_ids, parts = zip(*step, strict=True)
            chunks = [(done.get(seq_id, 0), len(part)) for _, seq_id, part in step]
            done.update((seq_id, sum(chunk)) for seq_id, chunk in zip(seq_ids, chunks, strict=True))
            self.statistics.prefill_flops += self.work.flops(chunks, len(step))
            logits.update(zip(prompts, self.model.prefill(self.cache, seq_ids, parts), strict=True))
            self.statistics.prefill_tokens += sum(len(part) for part in parts)
        self.statistics.prefill_seconds += time.perf_counter() - start
        return logits

    def _decode(self) -> Iterator[TextEvent | FinishedEvent]:
        """Advance all running continuations, by one token or by the accepted tokens of drafts."""
        start = time.perf_counter()
        running = list(self.running)
        self.statistics.decode_bytes += self.work.num_bytes(*self._positions_read())
        seq_ids = [c.seq_id for c in running]
        drafts = [self._draft(c) for c in running]
        logits: Iterable[np.ndarray]
        is_plain = all(len(draft.tokens) == 1 for draft in drafts)
        if is_plain:
            tokens = [draft.tokens[0] for draft in drafts]
            logits = self.model.decode(self.cache, seq_ids, tokens)[:, None]
        else:
            trees = [draft.tokens for draft in drafts], [draft.parents for draft in drafts]
            logits = self.model.logits(self.cache, seq_ids, *trees)
        self.statistics.decode_seconds += time.perf_counter() - start
        self._note_pages()
        leaves = {}
        for c, draft, rows in zip(running, drafts, logits, strict=True):
            self.statistics.drafted_tokens += len(draft.tokens) - 1
            leaf = yield from self._follow(c, draft, rows)
            if c in self.running:
                leaves[c.seq_id] = leaf
        if not is_plain:
            start = time.perf_counter()
            self.cache.commit_tree(list(leaves), list(leaves.values()))
            self.statistics.decode_seconds += time.perf_counter() - start

    def _positions_read(self) -> tuple[int, list[int]]:
        """Return the positions that the next step reads, in total and of each text.

        The total counts the positions of a shared prompt once.
        """
        prompts = {c.prompt: len(self.prompts[c.prompt]) for c in self.running}
        lengths = [prompts[c.prompt] + len(c.tokens) for c in self.running]
        if self.window is not None:  # windows do not share pages
            lengths = [min(length, self.window.size) for length in lengths]
            return sum(lengths), lengths
        return sum(prompts.values()) + sum(len(c.tokens) for c in self.running), lengths

    def _draft(self, c: _Continuation) -> Draft:
        if c.lookup is None:
            return Draft(c.tokens[-1:])
        # The last token of a continuation needs no row: its predecessor's logits decide it.
        room = self.budget.max_new_tokens(self.prompts[c.prompt]) - len(c.tokens) - 1
        return c.lookup.draft(self.max_drafts, room)

    def _follow(
        self, c: _Continuation, draft: Draft, logits: np.ndarray
    ) -> Generator[TextEvent | FinishedEvent, None, int]:
        """Sample along the draft until a token differs; return the last accepted node."""
        node = 0
        while True:
            token = yield from self._advance(c, logits[node])
            self.statistics.decode_tokens += 1
            if c.lookup:
                c.lookup.record(draft, node, token)
            if c not in self.running:
                return node
            child = draft.child(node, token)
            if child is None:
                return node
            node = child
            self.statistics.accepted_tokens += 1

    def _advance(
        self, c: _Continuation, logits: np.ndarray
    ) -> Generator[TextEvent | FinishedEvent, None, int]:
        """Sample the next token of a continuation, yield its events, and return it."""
        token = sample(logits, self.params, c.random)
        reason = None
        if token in self.model.config.eos_token_ids:
            reason = "eos"
        else:
            c.tokens.append(token)
            if c.lookup:
                c.lookup.append(token)
            text = c.stream.step(self.model.tokenizer, token) or ""
            c.text += text
            yield TextEvent(c.prompt, c.index, token, text)
            if len(c.tokens) == self.budget.max_new_tokens(self.prompts[c.prompt]):
                reason = "length"
        if reason:
            self.cache.remove_sequence(c.seq_id)
            self.running.remove(c)
            if all(other.prompt != c.prompt for other in self.running):
                self.reserved -= self.budget.pages_of_prompt(self.prompts[c.prompt])
            yield FinishedEvent(c.prompt, c.index, tuple(c.tokens), c.text, reason)
        return token

    def _note_pages(self) -> None:
        stats = self.cache.stats()
        self.statistics.cache_bytes = stats["page_pool_bytes"]
        if stats["num_used_pages"] > self.statistics.pages_used:
            self.statistics.pages_used = stats["num_used_pages"]
            self.statistics.pages_shared = stats["num_shared_pages"]
            if self.at_fullest:
                self.at_fullest(self.cache)
