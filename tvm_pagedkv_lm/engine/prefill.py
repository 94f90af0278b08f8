# SPDX-License-Identifier: Apache-2.0
"""`Prefill`: admits the waiting prompts that fit, computes them, and forks their continuations.

A prompt that begins like one that is being computed waits until it finds the pages of that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ..model.progress import report
from .batch import Batch, Continuation
from .disaggregated import RemotePrefill
from .settings import Settings
from .speculative import HitRates, PromptLookup
from .stop_strings import StopStrings


@dataclass(eq=False)
class _Admitted:
    """A prompt with a sequence of its own, which has `length` of its positions."""

    prompt: int
    seq_id: int
    num_reused: int
    length: int
    logits: Any = None  # of the last token: float32 [vocab_size], when all are there


class Prefill:
    """The prompts of a run that wait.

    Parameters
    ----------
    batch : Batch
        Takes the continuations of prompts that are computed.
    settings : Settings
    num_slots : int
        Maximum number of continuations that run at a time.
    num_pages : int
        Pages of the cache.
    remote : RemotePrefill, optional
        Computes the prompts instead of this process.
    """

    def __init__(
        self,
        batch: Batch,
        settings: Settings,
        num_slots: int,
        num_pages: int,
        remote: RemotePrefill | None,
    ) -> None:
        self.batch, self.settings, self.remote = batch, settings, remote
        self.num_slots = num_slots
        self.room = num_pages - batch.budget.pages_of_step()
        self.rates = HitRates()
        self.waiting = deque(range(len(batch.prompts)))
        self.admitted: list[_Admitted] = []
        self._texts: list[Any] = [np.asarray(prompt, "int32") for prompt in batch.prompts]
        self._ids = count(1 + max(batch.cache.sequence_ids(), default=-1))
        self._num_held = batch.num_used_pages() or 0  # by sequences of the caller
        self._full_since = -1  # `num_removed` when a prompt did not fit

    def admit(self) -> list[tuple[Continuation, np.ndarray]]:
        """Admit the waiting prompts that fit: prefill each once, then fork its continuations.

        Returns
        -------
        list of (continuation, logits)
            The new continuations, and the logits of the first token of each.
        """
        start = time.perf_counter()
        if self.remote is not None:
            self._compute_remotely(self.remote)
        else:
            while step := self._next_step():
                self._compute(step)
        if not self.admitted:
            return []
        self.batch.statistics.prefill_seconds += time.perf_counter() - start
        started = []
        while self.admitted:
            each = self.admitted.pop(0)
            forks = self._fork(each)
            self.batch.running += forks
            started += [(continuation, each.logits) for continuation in forks]
        self.batch.note_pages()
        return started

    def close(self) -> None:
        """Remove the sequences of prompts that have not started."""
        while self.admitted:
            self.batch.cache.remove_sequence(self.admitted.pop().seq_id)

    # --- admission ------------------------------------------------------------------------------

    def _next_step(self) -> list[tuple[_Admitted, Sequence[int]]]:
        """Return the prompts of the next step with the tokens to append to each.

        At most one of them continues in the step after, and is the first one there.
        """
        step, room = [], self.batch.budget.prefill_chunk_size
        for each in self.admitted[-1:]:
            if each.logits is None:
                step.append((each, self._part(each, room)))
        room -= sum(len(part) for _, part in step)
        index = 0
        while room and index < min(len(self.waiting), self.num_slots):
            prompt = self.waiting[index]
            if self._must_wait(prompt, step):
                index += 1
                continue
            admitted = self._admit(prompt)
            if admitted is None:
                break
            del self.waiting[index]
            step.append((admitted, self._part(admitted, room)))
            room -= len(step[-1][1])
        return step

    def _part(self, each: _Admitted, room: int) -> Sequence[int]:
        return self.batch.prompts[each.prompt][each.length : each.length + room]

    def _must_wait(self, prompt: int, step: list[tuple[_Admitted, Sequence[int]]]) -> bool:
        """Return whether a prompt of the step will have pages that this one can use."""
        if not self.settings.reuses_prefixes:
            return False
        page_size, text = self.batch.budget.page_size, self._texts[prompt]
        num_found = -1
        for each, _ in step:
            other = self._texts[each.prompt]
            if not np.array_equal(text[:page_size], other[:page_size]):
                continue
            if num_found < 0:
                num_found = self.batch.cache.match_prefix(text)
            # The last token is not reused.
            common = _common_length(text[:-1], other) // page_size * page_size
            if common > max(num_found, each.length):
                return True
        return False

    def _admit(self, prompt: int) -> _Admitted | None:
        """Add the sequence of a prompt; return None if it does not fit."""
        batch, params = self.batch, self.batch.params
        num_running = len(batch.running) + (len(self.admitted) + 1) * params.n
        if num_running > self.num_slots or self._full_since == batch.num_removed:
            return None
        seq_id = next(self._ids)
        num_reused = 0
        if self.settings.reuses_prefixes:
            num_reused = batch.cache.add_sequence(seq_id, self._texts[prompt])
        else:
            batch.cache.add_sequence(seq_id)
        self.admitted.append(_Admitted(prompt, seq_id, num_reused, num_reused))
        is_alone = len(self.admitted) == 1 and not batch.running  # then it fits
        if not is_alone and self._num_reserved_pages() > self.room:
            batch.cache.remove_sequence(self.admitted.pop().seq_id)
            self._full_since = batch.num_removed
            return None
        self._enable_window(seq_id)
        batch.statistics.prompt_tokens += len(batch.prompts[prompt])
        batch.statistics.reused_tokens += num_reused
        return self.admitted[-1]

    def _num_reserved_pages(self) -> int:
        """Return an upper bound on the pages in use, now and until all that runs has ended."""
        batch, budget, prompts = self.batch, self.batch.budget, self.batch.prompts
        used = None if self.settings.window else batch.num_used_pages()
        if used is None:  # texts give up pages while they grow
            indices = {each.prompt for each in self.admitted} | {c.prompt for c in batch.running}
            return self._num_held + sum(budget.pages_of_prompt(prompts[i]) for i in indices)
        for each in self.admitted:
            prompt = prompts[each.prompt]
            used += budget.pages_left_of_prompt(prompt, each.num_reused, each.length)
        return used + sum(
            budget.pages_left_of_text(prompts[c.prompt], c.length) for c in batch.running
        )

    # --- steps ----------------------------------------------------------------------------------

    def _compute(self, step: list[tuple[_Admitted, Sequence[int]]]) -> None:
        """Append the tokens of a step."""
        batch, statistics = self.batch, self.batch.statistics
        seq_ids = [each.seq_id for each, _ in step]
        parts = [part for _, part in step]
        chunks = [(each.length, len(part)) for each, part in step]
        rows = batch.model.prefill(batch.cache, seq_ids, parts)
        statistics.prefill_flops += batch.work.flops(chunks, len(step))
        statistics.prefill_tokens += sum(len(part) for part in parts)
        for (each, part), row in zip(step, rows, strict=True):
            if self.settings.reuses_prefixes:
                batch.cache.record_tokens(each.seq_id, part)
            each.length += len(part)
            num_tokens = len(batch.prompts[each.prompt])
            if each.length == num_tokens:
                each.logits = row
            if num_tokens > self.batch.budget.prefill_chunk_size:
                report(f"reading prompt {each.prompt + 1}", each.length, num_tokens)

    def _compute_remotely(self, remote: RemotePrefill) -> None:
        """Let the other end compute the prompts that fit."""
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()
        prompts = [(each.seq_id, self.batch.prompts[each.prompt]) for each in self.admitted]
        rows = remote.prefill(prompts) if prompts else []
        for each, row in zip(self.admitted, rows, strict=True):
            each.length, each.logits = len(self.batch.prompts[each.prompt]), row
            self.batch.statistics.prefill_tokens += each.length

    # --- continuations --------------------------------------------------------------------------

    def _fork(self, each: _Admitted) -> list[Continuation]:
        """Return the continuations of a prompt that is computed."""
        params, prompt = self.batch.params, self.batch.prompts[each.prompt]
        started = []
        for index in range(params.n):
            seq_id = each.seq_id
            if index:
                seq_id = next(self._ids)
                self.batch.cache.fork_sequence(each.seq_id, seq_id)
                self._enable_window(seq_id)
            random = np.random.default_rng([params.seed, index])
            lookup = (
                PromptLookup(prompt, self.rates) if self.settings.num_speculative_tokens else None
            )
            stops, stream = StopStrings(params.stop), self.batch.stream_of(each.prompt)
            started.append(
                Continuation(each.prompt, index, seq_id, random, lookup, len(prompt), stops, stream)
            )
        return started

    def _enable_window(self, seq_id: int) -> None:
        window = self.settings.window
        if window is not None:
            self.batch.cache.enable_sliding_window(seq_id, window.size, window.sinks)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading tokens that two texts share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
