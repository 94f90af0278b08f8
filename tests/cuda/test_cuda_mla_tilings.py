# SPDX-License-Identifier: Apache-2.0
"""MLA kernels take larger tiles on GPUs whose blocks may have more shared memory, emulated."""

from __future__ import annotations

import pytest

from tir_kernels.gpu.tiles.tiling import Tiling
from tir_kernels.spec import RopeSpec

from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..support.cases.kernels.attention_cases import cuda_text
from ..support.cases.kernels.cuda_cases import BF16, F16, F32, make_spec
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.tree_cases import LatentTrees
from ..support.emulators.cuda_emulator import (
    block_shared_bytes,
    emulated,
    launches,
    multiprocessors,
    mutated,
)

KIB = 1024
# Shared memory of a block -> rows of a tile, at most; of 8.6, 8.9 and 12.0, of 8.0, of 9.0.
TILE_ROWS = {99 * KIB: 32, 163 * KIB: 64, 227 * KIB: 64}
NONE = RopeSpec(rotary_dim=0)
SPEC = make_spec((16, 1), (576, 512), (BF16, BF16), kind="mla", rope=NONE)
parametrize_devices = pytest.mark.parametrize(
    "num_bytes", TILE_ROWS, ids=lambda num_bytes: f"{num_bytes // KIB}KB"
)


def shared_bytes(rows: int) -> int:
    """Return the shared memory of a block whose tile has this many rows."""
    (found,) = (t.num_bytes for t in Tiling.choices(SPEC, BF16) if t.rows == rows)
    return found


def rows_taken(num_bytes: int, run, fills_device: bool = True) -> int:
    """Run kernels on a device whose blocks may have so many bytes; returns the rows of a tile."""
    with multiprocessors(4), block_shared_bytes(num_bytes), launches() as made:
        run()
    (attend,) = (launch for launch in made if launch.shared_bytes)
    assert attend.shared_bytes <= num_bytes
    (tiling,) = (t for t in Tiling.choices(SPEC, BF16) if t.num_bytes == attend.shared_bytes)
    assert attend.threads == tiling.num_threads
    if fills_device:  # as many blocks as it holds, and so many merge
        resident = min((num_bytes + KIB) // (tiling.num_bytes + KIB), tiling.min_blocks)
        assert attend.grid[:2] == (4 * resident, 1)
        assert made[-1].grid[0] == attend.grid[0] and not made[-1].shared_bytes
    return tiling.rows


def test_tilings():
    """More memory is for more rows only, and only for latent rows on tensor cores."""
    tiles = [(t.rows, t.positions, t.num_bytes) for t in Tiling.choices(SPEC, BF16)]
    assert tiles == [(64, 32, 148160), (32, 16, 74112), (16, 16, 92416)]
    narrow = make_spec((16, 1), (144, 128), (F16, F16), kind="mla", rope=NONE)
    in_float = make_spec((16, 1), (576, 512), (F32, F32), kind="mla", rope=NONE)
    for spec in (narrow, in_float, make_spec((8, 2), 256)):
        assert Tiling.choices(spec, spec.kv_dtype) == [Tiling.of(spec, spec.kv_dtype)]


@parametrize_devices
def test_mla_prefill(num_bytes):
    case = LatentBatch(SPEC, [(9, 41), (0, 0), (20, 99), (1, 33)], 0)
    assert rows_taken(num_bytes, case.run) == TILE_ROWS[num_bytes]
    case.verify()


@parametrize_devices
def test_mla_tree(num_bytes):
    case = LatentTrees(SPEC, [(7, 70, [-1, 0, 0, 1, 1, 4, 3]), (5, 40, []), (2, 3, [-1, 0])], 0)
    assert rows_taken(num_bytes, case.run, fills_device=False) == TILE_ROWS[num_bytes]
    case.verify()


@parametrize_devices
def test_mla_prefill_shared(num_bytes):
    case = SharedBatch(SPEC, [(3, 9), (2, 4)], 0)
    assert rows_taken(num_bytes, case.run) == TILE_ROWS[num_bytes]
    case.verify()


@pytest.mark.parametrize("num_rows, tile_rows", [(1, 16), (2, 32), (3, 64), (5, 64)])
def test_few_rows_take_small_tiles(num_rows, tile_rows):
    """Where a sequence's rows fit into a smaller tile, warps of a larger one would be idle."""
    case = LatentBatch(SPEC, [(num_rows, 20), (num_rows, 30)], 0)
    assert rows_taken(227 * KIB, case.run) == tile_rows
    case.verify()


def test_a_choice_that_does_not_fit_fails():
    """The launch of a larger tile than the device has memory for is an error, not a result."""
    asks = " <= pagedkv_block_shared_bytes()"
    name, case = "mla_prefill", LatentBatch(SPEC, [(9, 41)], 0)
    source = mutated(cuda_text(name, SPEC), f"{shared_bytes(64)}{asks}", f"1{asks}")
    kernel = emulated(source).get_function(name)
    table = (case.page_indptr, case.page_ids, case.last_page_len)
    arguments = [case.tensor(x) for x in (case.q, case.query_indptr, case.pages, *table)]
    with block_shared_bytes(99 * KIB), pytest.raises(RuntimeError, match="out of range"):
        kernel(*arguments, case.o, case.lse, 1, case.sm_scale)
    kernel(*arguments, case.o, case.lse, 1, case.sm_scale)
    case.verify()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
