# SPDX-License-Identifier: Apache-2.0
"""TVMScript kernels of a paged KV cache: a spec in, a PrimFunc out.

`catalogue` names the kernels. The same spec gives the same kernel.
"""

from . import catalogue as catalogue
from .catalogue import build_kernel as build_kernel
from .catalogue import kernel_names as kernel_names
from .conv_spec import ConvSpec as ConvSpec
from .index_spec import IndexSpec as IndexSpec
from .recurrent_spec import RecurrentSpec as RecurrentSpec
from .spec import CudaTarget as CudaTarget
from .spec import GpuTarget as GpuTarget
from .spec import KernelSpec as KernelSpec
from .spec import VectorTarget as VectorTarget
