# SPDX-License-Identifier: Apache-2.0
"""Shares of what a machine can do whose read bandwidth may change from second to second.

A round of a peer has its best time, and the read bandwidths right before and after. The time is
compared with the higher one of these.
"""

from __future__ import annotations

import statistics

STEADY = 1.15  # times the lower one of two bandwidths: about the same


def is_steady(reads: list[float]) -> bool:
    """Whether bandwidths are about the same."""
    return max(reads) <= STEADY * min(reads)


def summary_of(rounds: list[dict]) -> dict:
    """What a record says of its rounds.

    Returns
    -------
    dict
        "rounds", which have "min_s" and "reads"; "read": the bandwidth, in the median of those that
        tell the share (the steady ones; all if none is); "unsteady": how many are not steady.
    """
    unsteady = sum(not is_steady(each["reads"]) for each in rounds)
    read = statistics.median(max(each["reads"]) for each in _telling(rounds))
    return {"rounds": rounds, "read": read, "unsteady": unsteady}


def share_of(record: dict, limits: dict[str, float]) -> tuple[float, bool]:
    """Share of the limit that binds, and whether that is reading.

    Of reading: the median of what the rounds reach beside their own bandwidth. Of multiplying: the
    best time's, of the best peak of the run.
    """
    multiplying = record["flops"] / limits[record["dtype"]]
    if record["bytes"] / record["read"] <= multiplying:
        return multiplying / record["min_s"], False
    rates = [(record["bytes"] / x["min_s"], max(x["reads"])) for x in _telling(record["rounds"])]
    return statistics.median(rate / read for rate, read in rates), True


def reads_text(record: dict) -> str:
    """GB/s of the bandwidths that the share is of: their median, or what they lie between."""
    reads = [max(each["reads"]) / 1e9 for each in _telling(record["rounds"])]
    if is_steady(reads):
        return f"{statistics.median(reads):.1f}"
    return f"{min(reads):.0f}-{max(reads):.0f}"


def _telling(rounds: list[dict]) -> list[dict]:
    return [each for each in rounds if is_steady(each["reads"])] or rounds
