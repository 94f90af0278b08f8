# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while workers run.

A terminal sends SIGINT to the controller and to all worker processes. A worker that dies, or a
controller that leaves answers unread, makes every later call fail, also those that clean up. So
workers ignore the signal, and the controller takes it between two calls.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ignored_by_children() -> Iterator[None]:
    """Let processes that are started in this block ignore SIGINT, which they inherit."""
    if threading.current_thread() is not threading.main_thread():  # only it can set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let SIGINT wait until this block has ended."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[-1])
