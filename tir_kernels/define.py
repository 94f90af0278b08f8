# SPDX-License-Identifier: Apache-2.0
"""Attributes of kernels, and the alignment of their arguments."""

from __future__ import annotations

from .spec import ITEMSIZE, CudaTarget, GpuTarget, KernelSpec

ACCESS_BYTES = 16  # that a thread of a GPU loads at once

# Arguments of `T.match_buffer` for int32 arrays and `lse`, which may start at any element.
I32 = {"dtype": "int32", "align": 4, "offset_factor": 1}
F32 = {"dtype": "float32", "align": 4, "offset_factor": 1}

_BEGINS_EARLY = "tirx.use_programtic_dependent_launch"  # spelt so in TVM


def aligned(spec: KernelSpec, dtype: str, min_align: int = 1) -> dict:
    """Return dtype and alignment of arrays of rows, as `T.match_buffer` takes them."""
    itemsize = ITEMSIZE[dtype]
    align = ACCESS_BYTES if isinstance(spec.target, GpuTarget) else max(itemsize, min_align)
    return {"dtype": dtype, "align": align, "offset_factor": align // itemsize}


def attributes(spec: KernelSpec) -> dict:
    """Attributes of a kernel's function; see `target_attributes`."""
    return target_attributes(on_cpu=not isinstance(spec.target, CudaTarget))


def target_attributes(*, on_cpu: bool) -> dict:
    """Attributes of a kernel's function.

    On GPUs blocks may begin before the previous kernel has ended; `cuda.launches` lets them
    wait.
    """
    if on_cpu:
        return {"s_tir": True, "tirx.is_scheduled": True, "tirx.noalias": True}
    return {"tirx.kernel_launch_params": [_BEGINS_EARLY]}
