# SPDX-License-Identifier: Apache-2.0
"""`Batch`: the continuations that run, and what prefill and decode share."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.config import ITEMSIZE

from ..model.model import DecoderModel
from ..model.work import Work
from .events import FinishedEvent, Statistics, TextEvent
from .page_budget import PageBudget
from .parameters import SamplingParams, sample
from .speculative import PromptLookup
from .stop_strings import StopStrings
from .text_stream import TextStream

_TIER = re.compile("reused_(.+)_tokens")


@dataclass(eq=False)
class Continuation:
    """One text that grows: continuation `index` of prompt `prompt`, in sequence `seq_id`."""

    prompt: int
    index: int
    seq_id: int
    random: np.random.Generator
    lookup: PromptLookup | None
    length: int  # positions of the sequence, without uncommitted nodes
    stops: StopStrings
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    undecided: list[int] = field(default_factory=list)  # tokens whose events wait for `stops`
    decided: str = ""  # their text, without what `stops` holds


class Batch:
    """The running continuations of a run.

    Parameters
    ----------
    model : DecoderModel
    cache : KVCache
    prompts : sequence of token ids
    params : SamplingParams
    budget : PageBudget
    records_tokens : bool
        Whether the cache is told the tokens of continuations, so that later prompts find them.
    on_peak_usage : callable, optional
        Called with the cache whenever more pages are in use than before.
    continues_text : sequence of bool, optional
        Which prompts are texts that are continued, not messages to answer; None: none of them.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        budget: PageBudget,
        records_tokens: bool,
        on_peak_usage: Callable[[KVCache], None] | None,
        continues_text: Sequence[bool] | None = None,
    ) -> None:
        self.model, self.cache, self.prompts, self.params = model, cache, prompts, params
        self.budget, self.records_tokens, self.on_peak_usage = budget, records_tokens, on_peak_usage
        self.continues_text = continues_text or [False] * len(prompts)
        added = model.tokenizer.get_added_tokens_decoder()
        self.special_tokens = {id for id, each in added.items() if each.special}
        options = model.options
        self.work = Work(
            model.config,
            ITEMSIZE[options.dtype],
            options.kv_dtype,
            model.matrix_bytes,
            model.expert_bytes,
            options.budgets,
            options.page_size,
            options.state_dtype,
        )
        self.statistics = Statistics(page_size=budget.page_size)
        self.running: list[Continuation] = []
        self.finished: list[Continuation] = []  # their sequences still exist
        self.num_removed = 0

    def stream_of(self, prompt: int) -> TextStream:
        """Return the text of a new continuation of a prompt."""
        before = self.prompts[prompt] if self.continues_text[prompt] else ()
        return TextStream(self.model.tokenizer, before)

    def advance(
        self, c: Continuation, logits: np.ndarray
    ) -> Generator[TextEvent | FinishedEvent, None, int]:
        """Sample the next token of a continuation, yield its events, and return it."""
        text = self.prompts[c.prompt]
        has_penalty = self.params.repetition_penalty != 1
        seen = [*text, *c.tokens] if has_penalty else ()
        try:
            token = sample(logits, self.params, c.random, seen)
        except ValueError as error:
            if self.model.options.dtype != "float16":
                raise
            raise ValueError(
                f"{error}; the activations of this model may exceed the range of float16: run it "
                "in bfloat16 (--dtype bfloat16)"
            ) from None
        reason = None
        if token in self.model.config.eos_token_ids:
            reason = "stop"
        else:
            if token in self.special_tokens:  # no stop string goes on behind it
                c.decided += c.stops.rest()
                yield from self._tell(c)
            c.tokens.append(token)
            if c.lookup:
                c.lookup.append(token)
            c.undecided.append(token)
            piece, is_stop = c.stops.push(c.stream.push(token))
            c.decided += piece
            if is_stop:
                reason = "stop"
            elif len(c.tokens) == self.budget.max_new_tokens(self.prompts[c.prompt]):
                reason = "length"
        if reason:
            c.decided += c.stops.rest()
        if not c.stops.held:
            yield from self._tell(c)
        if reason:
            self.running.remove(c)
            self.finished.append(c)
            yield FinishedEvent(c.prompt, c.index, tuple(c.tokens), c.text, reason)
        return token

    def _tell(self, c: Continuation) -> Iterator[TextEvent]:
        """Yield the events of the tokens that waited; the last of them has the text."""
        text, c.decided = c.decided, ""
        c.text += text
        while c.undecided:
            token = c.undecided.pop(0)
            yield TextEvent(c.prompt, c.index, token, "" if c.undecided else text)

    def remove_finished(self) -> None:
        """Remove the sequences of the continuations that have ended."""
        while self.finished:
            self._remove(self.finished.pop())

    def close(self) -> None:
        """Remove all sequences."""
        while self.running:
            self.finished.append(self.running.pop())
        self.remove_finished()

    def _remove(self, c: Continuation) -> None:
        num_decoded = c.length - len(self.prompts[c.prompt])
        if self.records_tokens and num_decoded:
            self.cache.record_tokens(c.seq_id, c.tokens[:num_decoded])
        self.cache.remove_sequence(c.seq_id)
        self.num_removed += 1

    def reused_by_tier(self) -> dict[str, int]:
        """Return the tokens that the cache has reused so far by where it had them.

        Empty for a cache with a single tier.
        """
        counts: Any = self.cache.stats().get("prefix_tiers", {})
        tiers = ((_TIER.fullmatch(name), count) for name, count in counts.items())
        return {found[1]: count for found, count in tiers if found}

    def num_used_pages(self) -> int | None:
        """Return the pages in use; None if all layers have windows."""
        groups = self.cache.stats()["groups"]
        return max((g["num_used_pages"] for g in groups if not g["window"]), default=None)

    def note_pages(self) -> None:
        """Record the pages in use if they are more than before."""
        stats = self.cache.stats()
        self.statistics.cache_bytes = stats["page_pool_bytes"]
        used = self.num_used_pages()
        if used is None:
            used = stats["num_used_pages"]
        if used > self.statistics.pages_used:
            self.statistics.pages_used = used
            self.statistics.pages_shared = stats["num_shared_pages"]
            if self.on_peak_usage:
                self.on_peak_usage(self.cache)
