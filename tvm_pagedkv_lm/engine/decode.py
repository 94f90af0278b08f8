# SPDX-License-Identifier: Apache-2.0
"""`Decode`: advances all running continuations, by one token or by the accepted ones of drafts."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator

import numpy as np

from .batch import Batch, Continuation
from .events import FinishedEvent, TextEvent
from .parameters import Window
from .speculative import Draft


class Decode:
    """The decode steps of a run.

    Parameters
    ----------
    batch : Batch
    window : Window, optional
        The sliding window of every text.
    max_drafts : int
        Maximum number of tokens that a step drafts for a continuation; 0: none.
    """

    def __init__(self, batch: Batch, window: Window | None, max_drafts: int) -> None:
        self.batch, self.window, self.max_drafts = batch, window, max_drafts

    def step(self) -> Iterator[TextEvent | FinishedEvent]:
        """Advance all running continuations, and yield their events."""
        batch, statistics = self.batch, self.batch.statistics
        start = time.perf_counter()
        running = list(batch.running)
        statistics.decode_bytes += batch.work.num_bytes(*self._positions_read())
        seq_ids = [c.seq_id for c in running]
        drafts = [self._draft(c) for c in running]
        logits: Iterable[np.ndarray]
        is_plain = all(len(draft.tokens) == 1 for draft in drafts)
        if is_plain:
            tokens = [draft.tokens[0] for draft in drafts]
            logits = batch.model.decode(batch.cache, seq_ids, tokens)[:, None]
        else:
            trees = [draft.tokens for draft in drafts], [draft.parents for draft in drafts]
            logits = batch.model.logits(batch.cache, seq_ids, *trees)
        statistics.decode_seconds += time.perf_counter() - start
        batch.note_pages()
        leaves: dict[int, int] = {}
        lengths = []
        for c, draft, rows in zip(running, drafts, logits, strict=True):
            statistics.drafted_tokens += len(draft.tokens) - 1
            num_tokens = statistics.decode_tokens
            leaves[c.seq_id] = yield from self._follow(c, draft, rows)
            lengths.append(c.length + statistics.decode_tokens - num_tokens)
        if not is_plain:
            start = time.perf_counter()
            batch.cache.commit_tree(list(leaves), list(leaves.values()))
            statistics.decode_seconds += time.perf_counter() - start
        for c, length in zip(running, lengths, strict=True):
            c.length = length
        batch.remove_finished()

    def _positions_read(self) -> tuple[int, list[int]]:
        """Return the positions that the next step reads, in total and of each text.

        The total counts the positions of a shared prompt once.
        """
        running = self.batch.running
        prompts = {c.prompt: len(self.batch.prompts[c.prompt]) for c in running}
        lengths = [prompts[c.prompt] + len(c.tokens) for c in running]
        if self.window is not None:  # windows do not share pages
            lengths = [min(length, self.window.size) for length in lengths]
            return sum(lengths), lengths
        return sum(prompts.values()) + sum(len(c.tokens) for c in running), lengths

    def _draft(self, c: Continuation) -> Draft:
        if c.lookup is None:
            return Draft(c.tokens[-1:])
        # The last token of a continuation needs no row: its predecessor's logits decide it.
        prompt = self.batch.prompts[c.prompt]
        room = self.batch.budget.max_new_tokens(prompt) - len(c.tokens) - 1
        # Rows that attend to chosen positions cannot be nodes of a tree that branches.
        branches = not self.batch.model.config.has_index
        return c.lookup.draft(self.max_drafts, room, branches=branches)

    def _follow(
        self, c: Continuation, draft: Draft, logits: np.ndarray
    ) -> Generator[TextEvent | FinishedEvent, None, int]:
        """Sample along the draft until a token differs; return the last accepted node."""
        node = 0
        while True:
            token = yield from self.batch.advance(c, logits[node])
            self.batch.statistics.decode_tokens += 1
            if c.lookup:
                c.lookup.record(draft, node, token)
            if c not in self.batch.running:
                return node
            child = draft.child(node, token)
            if child is None:
                return node
            node = child
            self.batch.statistics.accepted_tokens += 1
