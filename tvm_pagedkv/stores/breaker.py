# SPDX-License-Identifier: Apache-2.0
"""`CircuitBreaker`: leaves a store alone for a while after several failures in a row."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Counts failures in a row, and says when the next call may be made.

    Parameters
    ----------
    max_failures : int
        Failures in a row that open it.
    pause : float
        Seconds until the next call after it opens. Each further failure doubles them.
    max_pause : float
        The longest pause.
    clock : callable
        Returns seconds that never go back.
    """

    def __init__(
        self,
        max_failures: int,
        pause: float,
        max_pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures, self._pause, self._max_pause = max_failures, pause, max_pause
        self._clock = clock
        self._num_failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last calls failed, and none has succeeded since."""
        return self._num_failures >= self._max_failures

    @property
    def may_call(self) -> bool:
        """Whether the store may be called: the breaker is closed, or its pause is over."""
        return not self.is_open or self._clock() >= self._until

    def succeed(self) -> bool:
        """Count a success; return whether it closed the breaker."""
        was_open = self.is_open
        self._num_failures = 0
        return was_open

    def fail(self) -> bool:
        """Count a failure; return whether it opened the breaker."""
        was_open = self.is_open
        self._num_failures += 1
        if self.is_open:
            doublings = min(self._num_failures - self._max_failures, 32)
            self._until = self._clock() + min(self._pause * 2**doublings, self._max_pause)
        return self.is_open and not was_open
