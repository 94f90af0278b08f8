# SPDX-License-Identifier: Apache-2.0
"""Large page pools are advised to lie on huge pages; what comes of it is the system's choice.

Each case has a process of its own: other tests leave advised memory behind (NumPy advises too), and
whether some of it is given back meanwhile is not theirs to say.
"""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ...support.harness.cpp_build import ROOT

KERNELS = ("rope_append", "prefill", "decode", "copy_single_page")


def _advised_bytes() -> int:
    """Bytes of this process's memory with the flag that the advice leaves."""
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    advised = (part for part in mappings if re.search(r"VmFlags:.*\bhg\b", part))
    return sum(int(re.search(r"Size: +(\d+) kB", part)[1]) * 1024 for part in advised)


def _system_tells_advice() -> bool:
    """Whether memory advised by other means than the cache's shows the flag."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/proc/self/smaps").exists():
        return False
    before = _advised_bytes()
    with mmap.mmap(-1, 2**23) as memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return _advised_bytes() > before


def _pool_and_advice(max_total_tokens: int) -> dict[str, int]:
    import tvm

    import tvm_pagedkv  # noqa: F401  (registers the functions of the cache)

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
    counts = {"pool": cache.stats()["page_pool_bytes"], "advised": _advised_bytes() - before}
    del cache
    return {**counts, "left": _advised_bytes() - before}


@pytest.mark.skipif(not _system_tells_advice(), reason="the system does not tell what was advised")
@pytest.mark.parametrize("max_total_tokens", [64, 4096])
def test_large_pools_are_advised(max_total_tokens):
    code = (
        "import json\n"
        "from tests.cache.steps.test_huge_pages import _pool_and_advice\n"
        f"print(json.dumps(_pool_and_advice({max_total_tokens})))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout.splitlines()[-1])
    if max_total_tokens == 64:
        assert counts["advised"] == 0, counts
        return
    assert counts["advised"] >= counts["pool"] == 2 * 2**25, counts
    assert counts["left"] <= counts["advised"] - counts["pool"], counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_zeros_is_an_array_and_a_tensor_over_the_same_memory(dtype):
    from tvm_pagedkv.measure import HUGE_PAGE_BYTES, huge_zeros

    array, tensor = huge_zeros((3, 5, 7), dtype)
    assert array.shape == tensor.shape == (3, 5, 7)
    assert str(tensor.dtype) == array.dtype.name == dtype
    assert array.ctypes.data % HUGE_PAGE_BYTES == 0 and not array.any()
    array[2, 4] = range(7)
    assert (tensor.numpy() == array).all()
    del array
    assert tensor.numpy()[2, 4].tolist() == list(range(7))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_large_weights_begin_at_a_huge_page(dtype):
    from tvm_pagedkv._huge_pages import HUGE_PAGE_BYTES
    from tvm_pagedkv_lm.model.decoder_weights import _as_parameter

    for num_bytes in (64, 2 * HUGE_PAGE_BYTES):
        shape = (2, num_bytes // np.dtype(dtype).itemsize // 2)
        array = np.arange(np.prod(shape)).astype("uint8").reshape(shape).astype(dtype)
        tensor = _as_parameter(array)
        assert (tensor.shape, str(tensor.dtype)) == (shape, dtype)
        np.testing.assert_array_equal(tensor.numpy(), array)
        if num_bytes > 64:
            assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.skipif(not _system_tells_advice(), reason="the system does not tell what was advised")
def test_huge_zeros_are_advised():
    from tvm_pagedkv.measure import huge_zeros

    before = _advised_bytes()
    array, _ = huge_zeros((2**23,), "uint8")
    assert _advised_bytes() - before >= array.nbytes


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
