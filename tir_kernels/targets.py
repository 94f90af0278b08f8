# SPDX-License-Identifier: Apache-2.0
"""The components of each target that `moves` are written with, once for all targets.

A `Worker` does independent items of work: one thread of a CPU, or one block of a GPU. Where one of
its threads reads what another wrote, it calls `sync`.
"""

from __future__ import annotations

from types import ModuleType

from .cpu import worker as cpu_components
from .gpu.rows import rows as gpu_components
from .spec import GpuTarget, KernelSpec


def components_of(spec: KernelSpec) -> ModuleType:
    """Return the components for a spec's target."""
    return gpu_components if isinstance(spec.target, GpuTarget) else cpu_components
