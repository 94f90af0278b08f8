# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a decode step of either cache, alternating."""

from __future__ import annotations

import time
import traceback

import numpy as np

from .session import MAX_CHUNK, Session

CONTEXT, _TURNS, _STEPS = 900, 5, 30


def decode_ms(sessions: dict[str, Session], batch: int) -> dict[str, float]:
    """The median step of the best round of each session: `batch` sequences of 900 tokens.

    A session that cannot take so many tokens is left out.
    """
    ready = {name: session for name, session in sessions.items() if _fill(session, batch)}
    best = dict.fromkeys(ready, float("inf"))
    for _ in range(_TURNS):
        for name, session in ready.items():
            best[name] = min(best[name], _turn(session, batch))
    return best


def _fill(session: Session, batch: int) -> bool:
    try:
        for seq in range(batch):
            session.add(seq)
            for start in range(0, CONTEXT, MAX_CHUNK):
                session.extend({seq: [1 + i % 200 for i in range(start, CONTEXT)][:MAX_CHUNK]})
    except Exception:  # of any kind: TVM's cache may refuse, or its model
        traceback.print_exc()
        return False
    return True


def _turn(session: Session, batch: int) -> float:
    steps = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        session.decode(dict.fromkeys(range(batch), 7))
        steps.append(1e3 * (time.perf_counter() - start))
        for seq in range(batch):  # so that every step has the same context
            session.pop(seq, 1)
    return float(np.median(steps[3:]))
