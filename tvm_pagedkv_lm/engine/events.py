# SPDX-License-Identifier: Apache-2.0
"""The events that `generate` yields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextEvent:
    """A continuation has grown by a token.

    Attributes
    ----------
    prompt, continuation : int
        Index of the prompt, and of the continuation among those of the prompt.
    token : int
    text : str
        The text that the token adds; empty if it ends within a character.
    """

    prompt: int
    continuation: int
    token: int
    text: str


@dataclass(frozen=True)
class FinishedEvent:
    """A continuation has ended.

    Attributes
    ----------
    prompt, continuation : int
        Index of the prompt, and of the continuation among those of the prompt.
    tokens : tuple of int
    text : str
    finish_reason : {"stop", "length"}
    """

    prompt: int
    continuation: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass
class Statistics:
    """Counts and times of a run: the last event of `generate`."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of these; the cache had their rows
    reused_by_tier: dict[str, int] = field(default_factory=dict)  # where the cache tells
    prefill_tokens: int = 0  # that were computed
    prefill_seconds: float = 0.0
    prefill_flops: int = 0  # 0 if another process computed the prompts
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_bytes: int = 0  # weights, K and V read; the prompt of forks once per step
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pages_total: int = 0
    pages_used: int = 0  # maximum of the run
    pages_shared: int = 0  # pages of these with several owners
    page_size: int = 0
    cache_bytes: int = 0
