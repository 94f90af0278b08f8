# SPDX-License-Identifier: Apache-2.0
"""Assembly of kernels for AMX: whether they use tiles well, and never spill them."""

from __future__ import annotations

import re

# Tiles of A, tiles of B and sums of a step of a product, each of which is loaded or added to once.
STEPS = [("45", "67", "0123"), ("45", "6", "02"), ("4", "67", "01"), ("4", "6", "0")]


def instructions(assembly: str) -> list[tuple[str, str]]:
    """Return names and operands of the instructions on tiles, in order."""
    return re.findall(r"^\s+(tdp\w+|tile\w+|ldtilecfg)\s*(.*)$", assembly, re.M)


def check_products(assembly: str) -> int:
    """Return the number of wide steps, four loads and four products each, of a function.

    An AssertionError says that there are others than `STEPS`, or that a tile is on the stack.
    """
    found = instructions(assembly)
    frame = ("%rsp", "%rbp") if "%rsp, %rbp" in assembly else ("%rsp",)
    for name, operands in found:
        if name in ("tileloadd", "tilestored"):
            assert not any(each in operands for each in frame), f"spilled: {name} {operands}"
    # The target comes last in AT&T's order. Sums that are loaded are left out.
    targets = [
        re.search(r"%tmm(\d)(?:$|\s*#)", operands)[1]
        for name, operands in found
        if name in ("tileloadd", "tdpbf16ps")
        and (name == "tdpbf16ps" or re.search(r"%tmm[4-7](?:$|\s*#)", operands))
    ]
    kinds = "|".join("".join(step) for step in STEPS)
    assert re.fullmatch(f"(?:{kinds})+", "".join(targets))
    return "".join(targets).count("".join(STEPS[0]))
