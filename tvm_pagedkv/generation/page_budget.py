# SPDX-License-Identifier: Apache-2.0
"""`PageBudget`: upper bounds on the pages that prompts and their continuations take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .parameters import SamplingParams, Window


@dataclass(frozen=True)
class PageBudget:
    """Upper bounds on tokens and pages.

    Parameters
    ----------
    page_size : int
    context_length : int
        Maximum number of tokens of a text without a window.
    prefill_chunk_size : int
        Maximum rows of a prefill step.
    params : SamplingParams
    window : Window, optional
    max_drafts : int
        Maximum number of tokens that a step drafts for a continuation.
    """

    page_size: int
    context_length: int
    prefill_chunk_size: int
    params: SamplingParams
    window: Window | None
    max_drafts: int

    def max_new_tokens(self, prompt: Sequence[int]) -> int:
        """Return the maximum number of tokens of a continuation."""
        if self.window is not None:
            return self.params.max_tokens
        return min(self.params.max_tokens, self.context_length - len(prompt))

    def pages_of_prompt(self, prompt: Sequence[int]) -> int:
        """Return the pages of a prompt and its continuations, which share its full pages."""
        full = len(prompt) // self.page_size
        # The last token of a continuation is never appended.
        length = len(prompt) + self.max_new_tokens(prompt) - 1 + self.max_drafts
        own = -(-length // self.page_size) - full
        partial = 1 if len(prompt) % self.page_size and self.params.n > 1 else 0
        need = full + self.params.n * own + partial
        if self.window is None:
            return need
        # The sinks, and the window with one more row; each may begin and end within a page.
        parts = self.window.sinks, self.window.size - self.window.sinks
        return min(need, self.params.n * (sum(-(-part // self.page_size) for part in parts) + 2))

    def pages_of_step(self) -> int:
        """Return the pages that a prefill step takes in addition, until the window slides."""
        return 0 if self.window is None else -(-self.prefill_chunk_size // self.page_size)

    def num_pages(
        self, prompts: Sequence[Sequence[int]], num_slots: int, max_total_tokens: int | None
    ) -> int:
        """Return the pages of a cache in which every prompt can run.

        Parameters
        ----------
        prompts : sequence of token ids
        num_slots : int
            Continuations that run at a time.
        max_total_tokens : int, optional
            Capacity that the caller has chosen; None: what `num_slots` continuations can take.

        Raises
        ------
        ValueError
            If the chosen capacity is too small for one of the prompts.
        """
        needs = [self.pages_of_prompt(prompt) for prompt in prompts]
        if max_total_tokens is None:
            at_a_time = max(1, num_slots // self.params.n)
            return sum(sorted(needs)[-at_a_time:]) + self.pages_of_step()
        num_pages = -(-max_total_tokens // self.page_size)
        for index, (prompt, need) in enumerate(zip(prompts, needs, strict=True)):
            if need + self.pages_of_step() > num_pages:
                raise ValueError(
                    f"the cache is too small: prompt {index + 1} ({len(prompt)} tokens) with "
                    f"{self.params.n} continuations of up to {self.max_new_tokens(prompt)} tokens "
                    f"needs {need + self.pages_of_step()} pages of {self.page_size}, and "
                    f"max_total_tokens {max_total_tokens} gives {num_pages}"
                )
        return num_pages
