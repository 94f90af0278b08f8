# SPDX-License-Identifier: Apache-2.0
"""The line that `generate` prints about a run: rates, drafts and pages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.events import Statistics


@dataclass(frozen=True)
class MachineLimits:
    """Measured limits of the machine: flops and bytes read per second."""

    peak_flops: float
    read_bandwidth: float


def print_statistics(s: Statistics, limits: MachineLimits | None) -> None:
    """Print a line to stderr, with the share of the limits that was reached where they are given.

    Parameters
    ----------
    s : Statistics
    limits : MachineLimits, optional
    """
    prefill = decode = ""
    if limits is not None:
        prefill = _share(
            s.prefill_flops, s.prefill_seconds, limits.peak_flops, "multiplication peak"
        )
        decode = _share(s.decode_bytes, s.decode_seconds, limits.read_bandwidth, "read bandwidth")
    print(
        f"prefill {_rate(s.prefill_tokens, s.prefill_seconds)}{prefill}; {reused(s)}"
        f"decode {_rate(s.decode_tokens, s.decode_seconds)}{decode}; "
        f"{_drafts(s)}pages {s.pages_used} of {s.pages_total} used, {s.pages_shared} shared "
        f"(of {s.page_size}); cache {_size(s.cache_bytes)}",
        file=sys.stderr,
    )


def reused(s: Statistics) -> str:
    """Return how many tokens of the prompts were not computed, and which tiers had their rows."""
    if not s.reused_tokens:
        return ""
    tiers = [f"{count} from {tier}" for tier, count in s.reused_by_tier.items() if count]
    where = f" ({', '.join(tiers)})" if tiers else ""
    return f"reused {s.reused_tokens} of {s.prompt_tokens} prompt tokens{where}; "


def _rate(num_tokens: int, seconds: float) -> str:
    rate = f", {num_tokens / seconds:.0f} tokens/s" if seconds else ""
    return f"{num_tokens} tokens{rate}"


def _share(work: int, seconds: float, limit: float, of: str) -> str:
    return f" ({work / seconds / limit:.0%} of the {of})" if work and seconds else ""


def _drafts(s: Statistics) -> str:
    if not s.drafted_tokens:
        return ""
    accepted = s.accepted_tokens / s.drafted_tokens
    per_step = s.decode_tokens / (s.decode_tokens - s.accepted_tokens)
    return (
        f"accepted {s.accepted_tokens} of {s.drafted_tokens} drafted tokens ({accepted:.0%}), "
        f"{per_step:.2f} tokens a step; "
    )


def _size(num_bytes: int) -> str:
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.1f} MiB" if mebibytes >= 1 else f"{num_bytes / 2**10:.0f} KiB"
