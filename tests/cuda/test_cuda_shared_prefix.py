# SPDX-License-Identifier: Apache-2.0
"""Attention to pages that sequences share on GPUs, emulated, against the reference."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels import test_shared_prefix_kernel
from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..support.cases.kernels.attention_cases import cuda_text
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.emulators.cuda_emulator import (
    emulated,
    launches,
    multiprocessors,
    mutated,
    wrong_schedules,
)
from ..support.harness.selections import with_slow

FEW, MANY = 3, 132  # multiprocessors: blocks take several tiles and parts of others, or one part
NONE = RopeSpec(rotary_dim=0)
SPECS = {
    "5:1x80-bf16-p4": make_spec((5, 1), 80, (BF16, BF16), 4, rope=RopeSpec(5e5, 0.25, 20)),
    "4:2x32-f32-p16": make_spec((4, 2), 32, (F32, F32)),
    "3:1x264-f16-p32": make_spec((3, 1), 264, page=32),
    "6:3x48-f16-bf16-p1": make_spec((6, 3), 48, (F16, BF16), 1),
}
MLA = {
    "16x512+64-bf16-p16": make_spec((16, 1), (576, 512), (BF16, BF16), kind="mla", rope=NONE),
    "5x64+16-f16-p4": make_spec((5, 1), (80, 64), (F16, F16), 4, kind="mla", rope=NONE),
}
# Slots and rows of each segment: small ones, one that is cut many times, one of several tiles, and
# one without rows.
SEGMENTS = {
    "one": [(32, 1)],
    "long": [(700, 3)],
    "mixed": [(64, 5), (32, 0), (300, 40), (32, 2), (96, 70)],
}


def _batch(spec, segments, seed: int = 0) -> SharedBatch:
    return SharedBatch(spec, [(-(-slots // spec.page_size), n) for slots, n in segments], seed)


@pytest.mark.parametrize(
    "spec",
    # Quantized pages have a test with V in slices, which takes the longest of these.
    with_slow(
        [*SPECS.values(), *MLA.values()], SPECS["6:3x48-f16-bf16-p1"], MLA["16x512+64-bf16-p16"]
    ),
    ids=[*SPECS, *MLA],
)
@parametrize_seed
@on_gpu_too
def test_shared_prefix(spec, seed):
    for segments, count in itertools.product(SEGMENTS.values(), (FEW, MANY)):
        with multiprocessors(count):
            _batch(spec, segments, seed).check()


@parametrize_seed
@on_gpu_too
def test_some_segments_only(seed):
    """A few segments are chosen among more than a warp has lanes."""
    case = _batch(SPECS["4:2x32-f32-p16"], [(16 + n % 3 * 32, n % 4) for n in range(70)], seed)
    with multiprocessors(FEW):
        for first, last in ((0, 70), (0, 2), (37, 69), (1, 1)):
            case.check(first, last)


@parametrize_seed
@on_gpu_too
def test_every_kind_of_logit(seed):
    slopes = tuple(reference.alibi_slopes(5))
    spec = dataclasses.replace(SPECS["5:1x80-bf16-p4"], logit_softcap=1.5, alibi_slopes=slopes)
    for inline in (False, True):
        with multiprocessors(FEW):
            _batch(spec, SEGMENTS["mixed"], seed).check(inline=inline)


def test_blocks_take_equal_shares():
    """All copy as much of K and V, though one tile is long and the others are short."""
    spec = SPECS["4:2x32-f32-p16"]
    num_blocks, positions = 2 * FEW, 64
    # Units of both heads: 60 of one tile and 3 times 4 of others.
    case = _batch(spec, [(60 * positions, 2), (4 * positions, 66)], 0)
    with multiprocessors(FEW), launches() as made:
        case.check()
    of_unit = 2 * positions * spec.qk_head_dim * 4
    of_q = 64 * spec.qk_head_dim * 4
    assert made[0].grid == (num_blocks, 1, 1)
    share = 2 * (60 + 3 * 4) // num_blocks
    rest = [copied - share * of_unit for copied in made[0].copied_bytes]
    assert all(0 < n <= 6 * of_q and n % of_q == 0 for n in rest), rest


def test_longrope_inside_the_kernel_is_refused():
    test_shared_prefix_kernel.check_longrope_is_refused(SPECS["4:2x32-f32-p16"])


# --- barriers -----------------------------------------------------------------------------------

RACING = {  # O takes the place of Q: in the same layout, and in another one
    "prefill_shared": make_spec((2, 1), 64, page=8, rope=NONE),
    "mla_prefill_shared": make_spec((2, 1), (128, 64), page=8, rope=NONE, kind="mla"),
}
# Before a tile, and the tile of O is there; between them are those that `prefill` has too. The
# threads of a row have read its log.
BARRIERS = {
    " tvm_builtin_cuda_cta_sync();": (0, 4),
    " tvm_builtin_cuda_warp_sync();": (0,),
}


def _wrong_schedules(name: str, source: str, monkeypatch) -> list[str]:
    function = emulated(source).get_function(name)
    monkeypatch.setattr(test_shared_prefix_kernel, "compiled", lambda *arguments: function)

    def check():
        with multiprocessors(1):
            _batch(RACING[name], [(24, 70), (136, 40)]).check()

    return wrong_schedules(check)


def test_no_barrier_can_be_left_out(monkeypatch):
    """Each is missed by one of the kernels at least."""
    left = [(barrier, place) for barrier, places in BARRIERS.items() for place in places]
    for name, spec in RACING.items():
        source = cuda_text(name, spec)
        assert [source.count(barrier) for barrier in BARRIERS] == [5, 1]
        assert not _wrong_schedules(name, source, monkeypatch)
        left = [
            (barrier, place)
            for barrier, place in left
            if not _wrong_schedules(name, mutated(source, barrier, which=place), monkeypatch)
        ]
    assert not left


def test_warps_that_slice_v_wait_for_each_other(monkeypatch):
    """Two warps of a row read its log before one of them stores the merged one."""
    name, barrier = "mla_prefill_shared", " tvm_builtin_cuda_cta_sync();"
    sliced = make_spec((2, 1), (576, 512), page=8, rope=NONE, kind="mla")
    monkeypatch.setitem(RACING, name, sliced)
    source = cuda_text(name, sliced)
    assert source.count(barrier) == 3 * 6  # three tilings, of which the first one runs
    assert not _wrong_schedules(name, source, monkeypatch)
    assert _wrong_schedules(name, mutated(source, barrier, which=4), monkeypatch)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
