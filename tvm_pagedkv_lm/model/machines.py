# SPDX-License-Identifier: Apache-2.0
"""`Machines`: the virtual machines that run a model's functions, one for each call at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import tvm
from tvm import relax


class Machines:
    """A pool of Relax virtual machines over one library.

    A virtual machine has one program counter, one stack of frames and one result, so two calls must
    not share it. Calls that overlap, in different threads, borrow different machines; the library
    and the weights are shared. The pool grows with the number of calls that overlap, not with the
    number of threads, and keeps at most as many idle machines as there are CPUs.

    Parameters
    ----------
    library : tvm.runtime.Module
        The compiled functions.
    names : sequence of str
        The functions that callers need.
    """

    def __init__(self, library: tvm.runtime.Module, names: Sequence[str]):
        self._library, self._names = library, tuple(names)
        self._max_idle = os.cpu_count() or 1
        self._idle: list[Mapping[str, tvm.ffi.Function]] = []

    @contextmanager
    def borrow(self) -> Iterator[Mapping[str, tvm.ffi.Function]]:
        """Lend the functions of a machine, by name. After a failed call it is as good as before."""
        try:
            functions = self._idle.pop()  # atomic: two threads never get the same machine
        except IndexError:
            machine = new_machine(self._library)
            functions = {name: machine[name] for name in self._names}
        try:
            yield functions
        finally:
            if len(self._idle) < self._max_idle:
                self._idle.append(functions)


def new_machine(library: tvm.runtime.Module) -> relax.VirtualMachine:
    """Return a machine whose tensors come from malloc.

    TVM's pooled allocator, the default, keeps a block for every size that was ever asked for until
    the process ends. The sizes of a step depend on its rows, so prompts of different lengths would
    fill the memory with blocks that later steps cannot use.
    """
    return relax.VirtualMachine(library, tvm.cpu(), memory_cfg="naive")
