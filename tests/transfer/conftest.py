# SPDX-License-Identifier: Apache-2.0
"""A clock for time limits, so that no test depends on how fast the machine is."""

from __future__ import annotations

import pytest

from tvm_pagedkv.transfer import clock


class FakeClock:
    """Waits for peers end at once: they only move the time."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, selector, seconds: float) -> list:
        events = selector.select(0)
        if not events:
            self.time += seconds
        return events


@pytest.fixture
def fake_clock(monkeypatch) -> FakeClock:
    """The clock of the package's transfers for one test: `time` counts seconds from 0."""
    fake = FakeClock()
    for name in ("now", "sleep", "wait"):
        monkeypatch.setattr(clock, name, getattr(fake, name))
    return fake
