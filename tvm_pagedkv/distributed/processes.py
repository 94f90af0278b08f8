# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a Disco session, whose death ends a call and not the controller.

apache-tvm 0.27 throws where it writes to a pipe that nobody reads, also in destructors of its
objects, which ends the process. So the controller keeps the read end of the pipe to each worker,
and reads itself what is written after the worker has ended. An answer of that worker is then the
end of a file, which Disco reports as an error to the caller.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable

import tvm_ffi

_CHUNK_BYTES = 1 << 16


class WorkerProcess:
    """A worker process, and the pipes between it and the controller.

    Parameters
    ----------
    arguments : list of str
        Those of Python, without the two file descriptors that Disco's entry point takes last.

    Attributes
    ----------
    answers, commands : int
        File descriptors of the controller: the pipe that it reads, and the one that it writes to.
    """

    def __init__(self, arguments: list[str]):
        self.answers, answers_end = os.pipe()
        commands_end, self.commands = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *arguments, str(commands_end), str(answers_end)],
            pass_fds=(commands_end, answers_end),
        )
        os.close(answers_end)
        threading.Thread(target=self._read_for_the_dead, args=(commands_end,), daemon=True).start()

    def close(self) -> None:
        """End the process. Disco must not use the pipes any more."""
        self._process.kill()
        self._process.wait()
        os.close(self.commands)

    def _read_for_the_dead(self, commands_end: int) -> None:
        """Wait until the process has ended, then read its commands until they are closed."""
        ended = select.poll()
        ended.register(self.answers, 0)  # no events but the end of all writers
        ended.poll()
        while os.read(commands_end, _CHUNK_BYTES):
            pass
        os.close(commands_end)
        os.close(self.answers)


def _create_process_pool(num_workers: int, num_groups: int, entry: str) -> Callable:
    """Return the function by which Disco starts its workers: by rank, and 0 to end all."""
    processes: list[WorkerProcess] = []

    def start(rank: int) -> tvm_ffi.Shape | None:
        if rank == 0:
            while processes:
                processes.pop().close()
            return None
        process = WorkerProcess(["-m", entry, str(rank), str(num_workers), str(num_groups)])
        processes.append(process)
        return tvm_ffi.Shape((process.answers, process.commands))

    return start


tvm_ffi.register_global_func(
    "tvm_pagedkv.disco.create_process_pool", _create_process_pool, override=True
)
