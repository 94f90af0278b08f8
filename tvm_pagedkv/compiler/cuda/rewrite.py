# SPDX-License-Identifier: Apache-2.0
"""Changes of generated CUDA C++ that notice when TVM prints something else."""

from __future__ import annotations

import re
from collections.abc import Callable


def rewrite(
    source: str,
    pattern: re.Pattern,
    replacement: str | Callable[[re.Match], str],
    num_expected: int,
    what: str,
) -> str:
    """Replace all matches of a pattern.

    Parameters
    ----------
    num_expected : int
        Number of matches, counted in another way than by the pattern.
    what : str
        What matches, for the error.

    Raises
    ------
    RuntimeError
        If there are more or fewer matches: without the change, the code would be wrong or slow.
    """
    changed, count = pattern.subn(replacement, source)
    if count != num_expected:
        raise RuntimeError(
            f"the CUDA code that TVM generated has {num_expected} {what}, of which {count} look as "
            "expected; this version of apache-tvm prints code in another way"
        )
    return changed
