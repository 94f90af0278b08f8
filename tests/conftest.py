# SPDX-License-Identifier: Apache-2.0
"""Tests keep compiled files beside pytest's own cache, and workers leave each other the CPUs."""

import os
from pathlib import Path

_COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("TVM_PAGEDKV_CACHE", str(_COMPILED))

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two threads, so that kernels still split their work; idle ones sleep instead of spinning. What
    # tests start inherits it. Before the first import of tvm and torch, which read it once.
    os.environ.setdefault("TVM_NUM_THREADS", "2")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
