# SPDX-License-Identifier: Apache-2.0
"""Kinds of arguments of transfers, for the worlds "receive" and "send" of hostile_values.py."""

from __future__ import annotations

import tvm_ffi

from .hostile_values import INT64_MAX, INT64_MIN, UNKNOWN, WIDE, Kind, integer, shape

GROUPS = 3  # of 16 pages with 4 slots each
# Ids count from 1 within a cache: of the receive, of the send and of its first block.
RECEIVING_SEQ, RECEIVE = integer(2, UNKNOWN, 0, -1), integer(1, 0, -1, 2)
SEND = Kind(lambda: 1, {})  # one that has ended may be cancelled
BLOCK = integer(2, 0, -1, 1, 3)
SLOT_MAP = shape(
    (1, 0, 6) * GROUPS, none=(), cut=(1, 0), few=(1, 0, 6) * 2, many=(1, 0, 6) * 4,
    no_runs=(0,) * 3, negative=(1, -2, 6) * 3, not_wanted=(2, -1, 3, 0, 3) * 3,
    far=(1, 64, 6) * 3, beyond=(1, 60, 6) * 3, wide=(1, WIDE, 6) * 3, wide_run=(1, 0, WIDE + 6) * 3,
    low=(1, INT64_MIN, 6) * 3, high=(1, INT64_MAX, 6) * 3, long=(1, 0, INT64_MAX) * 3,
    run_of_0=(1, 0, 0) * 3, run_below_0=(1, 6, -6) * 3, runs_low=(INT64_MIN,) * 9,
    runs_high=(INT64_MAX,) * 9, twice=(2, 0, 3, 2, 3) * 3, lengths=(1, 0, 6, 1, 0, 5, 1, 0, 6),
)  # fmt: skip
NEW_RECEIVER = Kind(lambda: 7, {})
HANDLER = Kind(lambda: tvm_ffi.convert(lambda block: None), {}, takes_none=True)
POOL_SLOTS = shape(
    (64,) * GROUPS, none=(), few=(64, 64), many=(64,) * 4, zero=(64, 0, 64), negative=(-1, 64, 64),
    wide=(64, 64, WIDE + 64), low=(INT64_MIN, 64, 64), high=(64, 64, INT64_MAX),
)  # fmt: skip
