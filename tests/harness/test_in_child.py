# SPDX-License-Identifier: Apache-2.0
"""Failures and crashes in a child process are reported with the name of the case."""

from __future__ import annotations

import faulthandler
import os
import signal
import time

from ..support.harness.in_child import failures


def _fail() -> None:
    raise ValueError("on purpose")


def _crash() -> None:
    faulthandler.disable()  # no traceback of a crash on purpose
    os.kill(os.getpid(), signal.SIGSEGV)


def test_failures_have_names():
    done = ("fine", lambda: None)
    assert failures([done, done]) == []
    first, second = failures([("first", _fail), done, ("second", _crash), done])
    assert first.startswith("first: ") and "ValueError: on purpose" in first
    assert second == "second: ends the process by signal 11"
    assert failures([done, ("third", lambda: os._exit(3))]) == [
        "third: ends the process with status 3"
    ]
    assert failures([("fourth", lambda: time.sleep(60))], 0.2) == ["fourth: hangs for 0.2 s"]


def test_cases_that_cannot_be_drawn():
    (text,) = failures(1 / 0 for _ in range(1))
    assert "cannot be drawn" in text and "ZeroDivisionError" in text


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
