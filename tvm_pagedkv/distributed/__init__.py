# SPDX-License-Identifier: Apache-2.0
"""Models that run on several workers of a Disco session."""

from .disco import (
    forget,
    load_disco,
    process_session,
    reconnect,
    stage_function,
    threaded_session,
)
from .interrupts import deferred as deferred_interrupts
from .worker import Worker, current_worker

__all__ = [
    "Worker",
    "current_worker",
    "deferred_interrupts",
    "forget",
    "load_disco",
    "process_session",
    "reconnect",
    "stage_function",
    "threaded_session",
]
