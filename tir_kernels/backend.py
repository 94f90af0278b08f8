# SPDX-License-Identifier: Apache-2.0
"""The vocabulary in which `moves` are written once, with one implementation for each target.

`cpu.backend` and `cuda.backend` distribute independent items of work over workers. A worker is one
thread of a CPU or one block of a GPU; it copies, blends and rotates rows. Where one of its threads
reads what another wrote, it calls `sync`.
"""

from __future__ import annotations

from types import ModuleType

from .cpu import backend as cpu_backend
from .cuda import backend as cuda_backend
from .spec import CudaTarget, KernelSpec


def backend_of(spec: KernelSpec) -> ModuleType:
    """The backend for a spec's target."""
    return cuda_backend if isinstance(spec.target, CudaTarget) else cpu_backend
