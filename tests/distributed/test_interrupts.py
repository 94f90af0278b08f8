# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C with workers: no call stops half way, and all processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv.distributed import interrupts

from ..support.harness.selections import few_of


def test_deferred():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            with interrupts.deferred():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupts.deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_children_ignore_the_signal():
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    found = []
    with interrupts.ignored_by_children():
        found.append(subprocess.check_output([sys.executable, "-c", program], text=True))
    found.append(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert found == ["True\n", "False\n"]


@pytest.mark.parametrize("parts", ["--shards", "--stages"])
@pytest.mark.parametrize("seconds", few_of([0.2, 0.0, 2.0], 1), ids="in {} s".format)
def test_ctrl_c_ends_all_processes(parts, seconds):
    """During prefill, decode, or the end of the workers; `seconds` after they have started."""
    command = [sys.executable, "-m", "tvm_pagedkv_lm", "generate", "A list", "--model", "tiny"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "400", parts, "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stderr:
        if line.startswith("worker 1"):
            break
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=120)
    # After the run, whose statistics are the last line, the interpreter may have no handler left.
    after_run = (0, -signal.SIGINT) if "tokens/s" in error else ()
    assert process.returncode in (130, *after_run), error
    assert not any(word in error for word in ("Traceback", "terminate", "Interrupt")), error
    deadline = time.monotonic() + 30
    while running_in(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running_in(process.pid), "a worker is left"


def running_in(session: int) -> list[int]:
    """Processes of a session, without those that have ended and wait for their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(folder.name)] if state != "Z" else []
        except OSError:  # it has ended meanwhile
            continue
    return found


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
