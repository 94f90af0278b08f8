# SPDX-License-Identifier: Apache-2.0
"""The package's own error types."""

from __future__ import annotations

import re

# The counts are read from the message, because only that survives pickling: tvm-ffi drops the
# extra_context of an error there.
_COUNTS = re.compile(r"needs (\d+) pages, but (\d+) of (\d+) are available")


class CacheFullError(RuntimeError):
    """Too few pages are available; the call that raised it changed nothing.

    The message also names the sequences that hold most pages.

    Attributes
    ----------
    needed : int or None
        Pages that the call needs.
    available : int or None
        Pages that are free, or cached and reclaimable.
    total : int or None
        Pages of the layer group that is short of them.

    Notes
    -----
    The counts are None only if an error was not raised by the runtime.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        counts = _COUNTS.search(str(self))
        self.needed: int | None = int(counts[1]) if counts else None
        self.available: int | None = int(counts[2]) if counts else None
        self.total: int | None = int(counts[3]) if counts else None
