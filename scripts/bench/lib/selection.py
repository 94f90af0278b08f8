# SPDX-License-Identifier: Apache-2.0
"""The cases, head counts and types that a run of bench_cpu.py measures."""

from __future__ import annotations

import dataclasses

from lib.cases import DTYPES, HEADS, Case, Heads

EVEN = Case("decode", 8, 1, 1248)
SKEWED = Case("decode", 1, 1, 8192, ((7, 1, 256),))  # as many positions as EVEN
ALL = (
    Case("decode", 1, 1, 2048),
    Case("decode", 1, 1, 8192),
    Case("decode", 1, 1, 32768),
    Case("decode", 8, 1, 1024),
    Case("decode", 8, 1, 2048),
    Case("decode", 64, 1, 512),
    EVEN,
    SKEWED,
    Case("prefill", 1, 512, 512),
    Case("prefill", 1, 512, 512 + 2048),
    Case("prefill", 1, 512, 512 + 8192),
    Case("prefill", 1, 448, 448 + 2048, ((64, 1, 512),)),
)
QUICK = (ALL[1], ALL[3], EVEN, SKEWED, ALL[8], ALL[9])
TWO = ("float32", "bfloat16")
FEW = (ALL[1], ALL[3], ALL[8])  # of other head counts and widths
BEGIN_FORWARD = tuple(Case("begin_forward", batch, 1, 0) for batch in (1, 8, 64, 256, 1024))

MAIN_HEADS = Heads()
OTHER_HEADS = (
    *(Heads(kv=HEADS // group) for group in (1, 8)),
    *(Heads(dim=dim) for dim in (64, 256)),
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Cases that are measured with the same heads and type; all of them, or but a few."""

    dtype: str
    heads: Heads
    cases: tuple[Case, ...]
    is_full: bool


def tables_of(options) -> list[Table]:
    """The tables that the command line asks for.

    Parameters
    ----------
    options : argparse.Namespace
        dtypes, groups, dims, cases: lists or None (the default); quick: bool.
    """
    full = QUICK if options.quick else ALL
    if options.groups or options.dims:
        chosen = [
            (Heads(HEADS, HEADS // group, dim), full)
            for group in options.groups or [MAIN_HEADS.group]
            for dim in options.dims or [MAIN_HEADS.dim]
        ]
    else:
        chosen = [(MAIN_HEADS, full)]
        chosen += [] if options.quick else [(heads, FEW) for heads in OTHER_HEADS]
    found = []
    for heads, cases in chosen:
        dtypes = options.dtypes or (TWO if options.quick or cases is FEW else DTYPES)
        named = tuple(
            case
            for case in cases
            if options.cases is None or any(text in case.label for text in options.cases)
        )
        found += [Table(dtype, heads, named, cases is full) for dtype in dtypes if named]
    return found
