# SPDX-License-Identifier: Apache-2.0
"""The time of this package, and every wait for a peer: tests replace these functions together."""

from __future__ import annotations

import selectors
import time


def now() -> float:
    """Return seconds that never go back."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def wait(selector: selectors.BaseSelector, seconds: float | None) -> list:
    """Return the events of `selector`; empty if there are none within `seconds`."""
    return selector.select(seconds)


class Deadline:
    """A point in time, given in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._end = now() + seconds

    def left(self) -> float:
        """Return the seconds until then, at least 0."""
        return max(0.0, self._end - now())
