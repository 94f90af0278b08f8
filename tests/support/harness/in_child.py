# SPDX-License-Identifier: Apache-2.0
"""Run many small cases in a child process: a crash or a hang fails with the name of its case."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

Case = tuple[str, Callable[[], None]]


def failures(cases: Iterable[Case], seconds: float = 120) -> list[str]:
    """Run cases in a forked process; those that raise go on with the next one.

    Parameters
    ----------
    cases : iterable of (name, function)
        Drawn in the child, which has all that the parent has.
    seconds : float
        Time without news after which a case counts as hanging.

    Returns
    -------
    list of str
        A text for each case that failed. A crash or a hang is the last one.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            _run(cases, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        return _collect(child, read_end, seconds)
    finally:
        os.close(read_end)


def _run(cases: Iterable[Case], pipe: int) -> None:
    def tell(kind: str, text: str) -> None:
        os.write(pipe, json.dumps([kind, text]).encode() + b"\n")

    try:
        for name, case in cases:
            tell("begin", name)
            try:
                case()
            except BaseException:  # pytest's failures do not derive from Exception
                lines = traceback.format_exception(*sys.exc_info(), limit=-3)
                tell("failed", f"{name}: {''.join(lines)}")
        tell("end", "")
    except BaseException:
        tell("failed", f"the cases cannot be drawn: {traceback.format_exc()}")


def _collect(child: int, pipe: int, seconds: float) -> list[str]:
    failed, current, buffer, is_whole = [], "nothing", b"", False
    while True:
        if not select.select([pipe], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
            failed.append(f"{current}: hangs for {seconds} s")
            break
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            kind, text = json.loads(line)
            if kind == "begin":
                current = text
            elif kind == "failed":
                failed.append(text)
            is_whole = kind == "end"
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and not (failed and "hangs" in failed[-1]):
        failed.append(f"{current}: ends the process by signal {os.WTERMSIG(status)}")
    elif not is_whole and not failed:
        failed.append(f"{current}: ends the process with status {os.WEXITSTATUS(status)}")
    return failed
