# SPDX-License-Identifier: Apache-2.0
"""The components of each target that kernels for all targets are written with.

A `Worker` of `moves` does independent items of work: one thread of a CPU, or one block of a GPU.
Where one of its threads reads what another wrote, it calls `sync`. A `RowWorker` computes rows: it
loops over vectors of their columns, and sums over all of them.
"""

from __future__ import annotations

from types import ModuleType

from .cpu import worker as cpu_components
from .cpu.isa import vector_rows as cpu_rows
from .gpu.rows import rows as gpu_components
from .gpu.rows import vector_rows as gpu_rows
from .spec import GpuTarget, KernelSpec, VectorTarget


def components_of(spec: KernelSpec) -> ModuleType:
    """Return the components for a spec's target."""
    return gpu_components if isinstance(spec.target, GpuTarget) else cpu_components


def row_worker(target: VectorTarget | GpuTarget) -> cpu_rows.RowWorker | gpu_rows.RowWorker:
    """Return what computes rows on a target; to be made where a kernel's arguments are matched."""
    of_target = gpu_rows if isinstance(target, GpuTarget) else cpu_rows
    return of_target.RowWorker(target)
