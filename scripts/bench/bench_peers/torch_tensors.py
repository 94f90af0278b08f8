# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays as torch tensors, bfloat16 too; what peers inside torch share."""

from __future__ import annotations

import numpy as np
import torch
from lib.cases import FLUSH_BYTES, bits

from bench_peers.peer import Peer


def to_torch(values: np.ndarray) -> torch.Tensor:
    """A contiguous copy."""
    values = np.ascontiguousarray(values)
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(bits(values).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def to_numpy(values: torch.Tensor) -> np.ndarray:
    """Return the tensor as float32."""
    return values.float().numpy()


def int32(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32)


class TorchPeer(Peer):
    """Code that runs on torch's OpenMP threads, which also flush the caches."""

    version = f"torch {torch.__version__}"

    def __init__(self, cpus):
        torch.set_num_threads(len(cpus))
        torch.set_grad_enabled(False)
        self.cpus = cpus
        self._flush = torch.ones(FLUSH_BYTES // 4)
