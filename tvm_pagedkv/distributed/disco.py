# SPDX-License-Identifier: Apache-2.0
"""Disco sessions on CPUs: workers that run a model together, and their collective operations.

Disco has no collectives for CPUs. Here a socket connects every pair of workers, and `collectives`
registers the functions that Disco looks up by name: `allreduce`, `allgather` and
`broadcast_from_worker0` within a worker's group, and `send_to_next_group` and
`recv_from_prev_group`, which pass activations between pipeline stages. Models call them through
``tvm.relax.op.ccl``.

Workers are threads or processes of one machine. Each has its own cache, with the layers of its
pipeline stage (`KVCacheConfig.layer_indptr`) and its share of the heads.

A session ends when nothing refers to it or to an object of its workers. apache-tvm 0.27 then joins
its threads while it holds Python's lock; and if a reference is dropped after `Session.shutdown`,
Disco notifies a worker that no longer exists, which ends the process. So workers get no objects
that only Python can free, the Python state of a worker is kept in `worker` until `forget`, and
nothing here calls `shutdown`.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import tempfile

import tvm
import tvm_ffi

from . import (
    collectives,  # noqa: F401  registers the functions of workers
    interrupts,
    processes,  # noqa: F401  registers the function that starts them
)


def load_disco():
    """Return the module ``tvm.runtime.disco``, which apache-tvm 0.27 does not import by itself."""
    disco = importlib.import_module("tvm.runtime.disco")
    functions = importlib.import_module("tvm.runtime.disco._ffi_api")
    if not hasattr(functions, "SessionThreaded"):
        tvm_ffi.init_ffi_api("runtime.disco", functions.__name__)
    tvm.runtime.disco = disco
    return disco


def threaded_session(num_workers: int, num_groups: int = 1):
    """Start a Disco session whose workers are threads of this process.

    Parameters
    ----------
    num_workers : int
        A multiple of `num_groups`.
    num_groups : int
        Number of pipeline stages. The workers of a stage have consecutive ids.

    Returns
    -------
    tvm.runtime.disco.ThreadedSession

    Raises
    ------
    ValueError
        If the numbers do not fit.
    """
    _check_sizes(num_workers, num_groups)
    session = load_disco().ThreadedSession(num_workers, num_groups)
    return _connected(session, num_workers, num_groups)


def process_session(num_workers: int, num_groups: int = 1):
    """Start a Disco session whose workers, except the first, are processes.

    Parameters and errors are those of `threaded_session`.
    """
    _check_sizes(num_workers, num_groups)
    entry = "tvm_pagedkv.distributed.disco_worker"
    load_disco()
    functions = importlib.import_module("tvm.runtime.disco._ffi_api")
    with interrupts.ignored_by_children():
        # Not Disco's own pool, under which the death of a worker ends this process.
        session = functions.SessionProcess(
            num_workers, num_groups, "tvm_pagedkv.disco.create_process_pool", entry
        )
        session._configure_structlog()
    return _connected(session, num_workers, num_groups)


def _check_sizes(num_workers: int, num_groups: int) -> None:
    if num_groups < 1 or num_workers < 1 or num_workers % num_groups:
        raise ValueError(
            f"num_workers must be a multiple of num_groups, both at least 1; got {num_workers} and "
            f"{num_groups}"
        )


def _connected(session, num_workers: int, num_groups: int):
    _let_meet(session, "tvm_pagedkv.disco.connect", num_workers, num_groups)
    return session


def reconnect(session) -> None:
    """Give the workers new sockets, after a call in which some have closed theirs.

    Raises
    ------
    RuntimeError
        If a worker has ended, or was not reached in time.
    """
    _let_meet(session, "tvm_pagedkv.disco.reconnect")


def _let_meet(session, function: str, *sizes: int) -> None:
    """Let the workers connect in a private folder."""
    folder = tempfile.mkdtemp(prefix="pagedkv-")
    try:
        with interrupts.deferred():
            answers = session.get_global_func(function)(folder, *sizes)
            errors = [answers.debug_get_from_remote(rank) for rank in range(session.num_workers)]
    except RuntimeError:
        raise RuntimeError("a worker has ended before it was connected") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if any(errors):
        raise RuntimeError(f"workers are not connected: {'; '.join(filter(None, errors))}")


def forget(session) -> None:
    """Drop the Python state of the workers: their sockets and `Worker.state`.

    After this the workers cannot communicate. They end with the last reference to `session` or to
    an object of its workers.
    """
    for kept in ("_cache", "_import_python_module"):  # these refer to the session
        if hasattr(session, kept):
            delattr(session, kept)
    session.get_global_func("tvm_pagedkv.disco.forget")()
    session._sync_all()


def stage_function(session, module, name: str):
    """Return a function that runs on every worker the function of its pipeline stage.

    Parameters
    ----------
    session : tvm.runtime.disco.Session
        A session of this module with one group per stage.
    module : DRef of a Relax VM
        The result of `Session.load_vm_module`.
    name : str
        The module has a function ``{name}_{stage}`` for each stage. Its first argument is a tensor,
        and its result is a tensor of the same shape and dtype.

    Returns
    -------
    callable
        Takes the input of the first stage; each later stage receives the result of the stage before
        it. Returns a DRef to the result of each stage: on the last stage, the model's result.
    """
    return functools.partial(session.get_global_func("tvm_pagedkv.disco.run_stage"), module, name)
