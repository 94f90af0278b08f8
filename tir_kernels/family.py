# SPDX-License-Identifier: Apache-2.0
"""The two families of code, for CPUs and for GPUs, behind one vocabulary.

Kernels that move rows are written once, in terms of a family: `cpu.team` or `cuda.team`. It defines
kernels and matches their arguments, and shares out items of work to teams: one thread of a CPU, all
threads of a block of a GPU. A team copies, maps and rotates rows; where one of its threads reads
what another wrote, it meets.
"""

from __future__ import annotations

from types import ModuleType

from .cpu import team as cpu_team
from .cuda import team as cuda_team
from .spec import CudaTarget, KernelSpec


def family_of(spec: KernelSpec) -> ModuleType:
    """The family that a spec's target belongs to."""
    return cuda_team if isinstance(spec.target, CudaTarget) else cpu_team
