# SPDX-License-Identifier: Apache-2.0
"""Shares of what a machine can do whose read bandwidth may change from second to second.

A turn is what a peer ran in a round: its best time, and the read bandwidths right before and after.
It is held against the higher one of these.
"""

from __future__ import annotations

import statistics

STEADY = 1.15  # times the lower one of two bandwidths: about the same


def is_steady(reads: list[float]) -> bool:
    """Whether bandwidths are about the same."""
    return max(reads) <= STEADY * min(reads)


def summary_of(turns: list[dict]) -> dict:
    """What a record says of its turns.

    Returns
    -------
    dict
        "turns", which have "min_s" and "reads"; "read": the bandwidth, in the median of those that
        tell the share (the steady ones; all if none is); "unsteady": how many are not steady.
    """
    unsteady = sum(not is_steady(turn["reads"]) for turn in turns)
    read = statistics.median(max(turn["reads"]) for turn in _telling(turns))
    return {"turns": turns, "read": read, "unsteady": unsteady}


def share_of(record: dict, limits: dict[str, float]) -> tuple[float, bool]:
    """Share of the limit that binds, and whether that is reading.

    Of reading: the median of what the turns reach beside their own bandwidth. Of multiplying: the
    best time's, of the best peak of the run.
    """
    multiplying = record["flops"] / limits[record["dtype"]]
    if record["bytes"] / record["read"] <= multiplying:
        return multiplying / record["min_s"], False
    rates = [(record["bytes"] / x["min_s"], max(x["reads"])) for x in _telling(record["turns"])]
    return statistics.median(rate / read for rate, read in rates), True


def reads_text(record: dict) -> str:
    """GB/s of the bandwidths that the share is of: their median, or what they lie between."""
    reads = [max(turn["reads"]) / 1e9 for turn in _telling(record["turns"])]
    if is_steady(reads):
        return f"{statistics.median(reads):.1f}"
    return f"{min(reads):.0f}-{max(reads):.0f}"


def _telling(turns: list[dict]) -> list[dict]:
    return [turn for turn in turns if is_steady(turn["reads"])] or turns
