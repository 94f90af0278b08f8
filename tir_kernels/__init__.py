# SPDX-License-Identifier: Apache-2.0
"""TVMScript kernels of a paged KV cache: a spec in, a PrimFunc out; no state, no I/O."""

from __future__ import annotations

from collections.abc import Callable

from . import append, merge, page_copy
from .cpu import decode, prefill
from .spec import KernelSpec

BUILDERS: dict[str, Callable] = {
    "transpose_append": append.transpose_append,
    "split_rotary": append.split_rotary,
    "rope_append": append.rope_append,
    "prefill_ragged": prefill.prefill_ragged,
    "prefill": prefill.prefill,
    "decode": decode.decode,
    "merge": merge.merge,
    "copy_single_page": page_copy.copy_single_page,
    "debug_get_kv": page_copy.debug_get_kv,
    "compact_copy": page_copy.compact_copy,
}


def build_kernel(name: str, spec: KernelSpec):
    """Build the kernel `name` for `spec`; a private PrimFunc, free to be named by its module."""
    if name not in BUILDERS:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(BUILDERS)}")
    return BUILDERS[name](spec)
