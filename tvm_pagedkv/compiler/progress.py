# SPDX-License-Identifier: Apache-2.0
"""Progress of compilation: INFO records of the logger ``tvm_pagedkv.compiler``, and a callback."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

_log = logging.getLogger("tvm_pagedkv.compiler")


@contextlib.contextmanager
def compiling(what: str, progress: Callable[[str], None] | None = None) -> Iterator[None]:
    """Report a compilation: a line before it, and one with its duration if it succeeds.

    Parameters
    ----------
    what : str
        What is compiled, such as "12 kernels".
    progress : callable, optional
        Called with each line, which is logged as well.
    """

    def report(line: str) -> None:
        _log.info(line)
        if progress is not None:
            progress(line)

    start = time.perf_counter()
    report(f"compiling {what}")
    yield
    report(f"compiled in {time.perf_counter() - start:.1f} s")
