# SPDX-License-Identifier: Apache-2.0
"""What `generation.generate` yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextEvent:
    """A continuation has grown: `text` is what `token` added, empty within a character."""

    prompt: int
    continuation: int
    token: int
    text: str


@dataclass(frozen=True)
class FinishedEvent:
    """A continuation has ended: `reason` is "eos" or "length"."""

    prompt: int
    continuation: int
    tokens: tuple[int, ...]
    text: str
    reason: str


@dataclass
class Statistics:
    """What a run took. The last event of `generate`."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_flops: int = 0  # 0 where another process has done it
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_bytes: int = 0  # of weights, K and V; K and V of a common prompt once a step
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pages_total: int = 0
    pages_used: int = 0  # at the fullest moment
    pages_shared: int = 0  # of these, pages with more than one owner
    page_size: int = 0
    cache_bytes: int = 0
