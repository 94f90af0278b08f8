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

    def pages_of_text(self, prompt: Sequence[int]) -> int:
        """Return the pages of a prompt and one continuation, without a window."""
        # The last token of a continuation is never appended.
        length = len(prompt) + self.max_new_tokens(prompt) - 1 + self.max_drafts
        return -(-length // self.page_size)

    def pages_of_prompt(self, prompt: Sequence[int]) -> int:
        """Return the pages of a prompt and its continuations, which share its full pages."""
        full = len(prompt) // self.page_size
        own = self.pages_of_text(prompt) - full
        partial = 1 if len(prompt) % self.page_size and self.params.n > 1 else 0
        need = full + self.params.n * own + partial
        if self.window is None:
            return need
        # The sinks, and the window with one more row; each may begin and end within a page.
        parts = self.window.sinks, self.window.size - self.window.sinks
        return min(need, self.params.n * (sum(-(-part // self.page_size) for part in parts) + 2))

    def pages_left_of_prompt(self, prompt: Sequence[int], num_reused: int, length: int) -> int:
        """Return the pages that a prompt and its continuations may still take.

        Parameters
        ----------
        prompt : sequence of int
        num_reused : int
            Positions that were found. The next write copies a page that is not full.
        length : int
            Positions that the sequence has.
        """
        has_written = length > num_reused
        held = -(-length // self.page_size) if has_written else length // self.page_size
        return self.pages_of_prompt(prompt) - held

    def pages_left_of_text(self, prompt: Sequence[int], length: int) -> int:
        """Return the pages that a continuation of `length` positions may still take."""
        # Forks share the last page of the prompt until they write to it.
        is_shared = self.params.n > 1 and length == len(prompt)
        held = length // self.page_size if is_shared else -(-length // self.page_size)
        return self.pages_of_text(prompt) - held

    def pages_of_step(self) -> int:
        """Return the pages that a prefill step takes in addition, until the window slides."""
        return 0 if self.window is None else -(-self.prefill_chunk_size // self.page_size)

    def num_pages(self, prompts: Sequence[Sequence[int]], num_slots: int) -> int:
        """Return the pages of the largest batch of `num_slots` continuations."""
        needs = sorted(self.pages_of_prompt(prompt) for prompt in prompts)
        at_a_time = max(1, num_slots // self.params.n)
        return sum(needs[-at_a_time:]) + self.pages_of_step()

    def check(self, prompts: Sequence[Sequence[int]], num_pages: int, given: str) -> None:
        """Raise a ValueError if a prompt with its continuations does not fit.

        Parameters
        ----------
        prompts : sequence of token ids
        num_pages : int
        given : str
            What gives these pages, for the error.
        """
        for index, prompt in enumerate(prompts):
            need = self.pages_of_prompt(prompt) + self.pages_of_step()
            if need > num_pages:
                raise ValueError(
                    f"the cache is too small: prompt {index + 1} ({len(prompt)} tokens) with "
                    f"{self.params.n} continuations of up to {self.max_new_tokens(prompt)} tokens "
                    f"needs {need} pages of {self.page_size}, and {given} gives {num_pages}"
                )
