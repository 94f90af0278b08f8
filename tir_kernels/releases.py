# SPDX-License-Identifier: Apache-2.0
"""Names of apache-tvm that differ between the releases that the project runs with: 0.26 and 0.27.

Other modules of kernels and their compilation import them from here; names of Relax stand in the
`releases` of the Relax front end.
"""

from __future__ import annotations

import tvm

SERIES = tuple(int(part) for part in tvm.__version__.split(".")[:2])

if SERIES >= (0, 27):
    from tvm.ir import StringImm, TensorLoad, TensorRegion
else:
    from tvm.tirx import BufferLoad as TensorLoad
    from tvm.tirx import BufferRegion as TensorRegion
    from tvm.tirx import StringImm

if SERIES >= (0, 27):
    from tvm.backend.cuda import export_cuda_host
    from tvm.s_tir import SBlock, SBlockRealize
else:
    from tvm.tirx import SBlock, SBlockRealize

    export_cuda_host = None  # `require_cuda` refuses


def buffer_of(load: TensorLoad):
    """Return the buffer that an element is loaded from."""
    return load.source if SERIES >= (0, 27) else load.buffer


def require_cuda() -> None:
    """Raise a RuntimeError if the installed release has no intrinsics and launchers for CUDA."""
    if SERIES < (0, 27):
        raise RuntimeError(
            f"kernels for CUDA need apache-tvm 0.27 or newer, found {tvm.__version__}"
        )


__all__ = [
    "SERIES",
    "SBlock",
    "SBlockRealize",
    "StringImm",
    "TensorLoad",
    "TensorRegion",
    "buffer_of",
    "export_cuda_host",
    "require_cuda",
]
