# SPDX-License-Identifier: Apache-2.0
"""Large page pools are advised to lie on huge pages; what comes of it is the system's choice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tvm

import tvm_pagedkv  # noqa: F401  (registers the functions of the cache)

KERNELS = ("rope_append", "prefill", "decode", "copy_single_page")
pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the system has no transparent huge pages",
)


def _advised_bytes() -> int:
    """Bytes of this process's memory with the flag that the advice leaves."""
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    advised = (part for part in mappings if re.search(r"VmFlags:.*\bhg\b", part))
    return sum(int(re.search(r"Size: +(\d+) kB", part)[1]) * 1024 for part in advised)


@pytest.mark.parametrize("max_total_tokens", [64, 4096])
def test_large_pools_are_advised(max_total_tokens):
    layer = {"kind": "mha", "num_qo_heads": 8, "num_kv_heads": 8, "qk_head_dim": 128}
    config = {
        "max_num_sequences": 2,
        "max_total_tokens": max_total_tokens,
        "prefill_chunk_size": 16,
        "page_size": 16,
        "dtype": "float32",
        "rope_mode": 0,
        "layers": [layer] * 2,
    }
    nothing = tvm.runtime.convert(lambda *_: None)
    create = tvm.get_global_func("pagedkv.create")
    before = _advised_bytes()
    cache = create(config, dict.fromkeys(KERNELS, nothing), tvm.cpu())
    pool_bytes = cache.stats()["page_pool_bytes"]
    grown = _advised_bytes() - before
    if max_total_tokens == 64:
        assert grown == 0
        return
    assert grown >= pool_bytes == 2 * 2**25
    del cache
    assert _advised_bytes() <= before + grown - pool_bytes
