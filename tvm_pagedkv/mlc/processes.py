# SPDX-License-Identifier: Apache-2.0
"""Processes that mlc-llm starts: just-in-time compilers, and workers of several devices."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import tvm_ffi

from ..distributed import load_disco
from .modules import find
from .patches import Overlay, Patches

_CREATE_POOL = "runtime.disco.create_process_pool"
_WORKERS = {"mlc_llm.cli.worker": "tvm_pagedkv.mlc.worker"}


def compile_with_our_cache(patches: Patches, flashinfer: bool) -> None:
    """Let the compiler that mlc-llm starts for a model without a library use our cache.

    The libraries it makes lie beside mlc-llm's own, in a folder for each setting: mlc-llm finds
    them by the model's settings alone, and would take a library with another cache.
    """
    jit = find("mlc_llm.interface.jit", "subprocess", "MLC_LLM_HOME")
    options = ["--flashinfer"] if flashinfer else []

    def run(command: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(command, list) and command[:3] == [sys.executable, "-m", "mlc_llm"]:
            command = [*command[:2], "tvm_pagedkv.mlc", *options, *command[3:]]
        return subprocess.run(command, *args, **kwargs)

    home = jit.MLC_LLM_HOME / ("tvm_pagedkv_flashinfer" if flashinfer else "tvm_pagedkv")
    (home / "model_lib").mkdir(parents=True, exist_ok=True)
    patches.set(jit, "MLC_LLM_HOME", home)
    patches.set(jit, "subprocess", Overlay(jit.subprocess, run=run))


class WorkerPools:
    """Starts Disco's worker processes with our library in them, until `undo`."""

    def __init__(self) -> None:
        load_disco()
        self._original = tvm_ffi.get_global_func(_CREATE_POOL)
        tvm_ffi.register_global_func(_CREATE_POOL, self._create, override=True)

    def _create(self, num_workers: int, num_groups: int, entrypoint: str) -> Any:
        return self._original(num_workers, num_groups, _WORKERS.get(entrypoint, entrypoint))

    def undo(self) -> None:
        """Start workers as before."""
        tvm_ffi.register_global_func(_CREATE_POOL, self._original, override=True)
