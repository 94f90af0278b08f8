# SPDX-License-Identifier: Apache-2.0
"""Attention of one row per sequence on GPUs, emulated, against the reference."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tir_kernels.gpu.tiles.decode_tiling import DecodeTiling
from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels import attention_cases
from ..support.cases.kernels.attention_cases import PagedBatch, cuda_text
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.emulators.cuda_emulator import (
    block_shared_bytes,
    emulated,
    launches,
    multiprocessors,
    mutated,
    wrong_schedules,
)
from ..support.harness.selections import every_nth, latin_square

KIB = 1024
LITTLE = 99 * KIB  # of shared memory that a block may have
FEW = 3  # multiprocessors: six blocks, each with several sequences
SPECS = {
    "8:2x128-f16-p16": make_spec((8, 2), 128),
    "71:1x80-bf16-p4": make_spec((71, 1), 80, (BF16, BF16), 4),
    "150:1x16-f16-p8": make_spec((150, 1), 16, (F16, F16), 8),
    "3:1x64-f32-p64": make_spec((3, 1), 64, (F32, F32), 64),
    "2:2x24-f32-f16-p1": make_spec((2, 2), 24, (F32, F16), 1),
    "20:1x40-f16-f32-p2": make_spec((20, 1), 40, (F16, F32), 2),
    "20:1x256-f32-p16": make_spec((20, 1), 256, (F32, F32)),
    "1:1x512-f16-p256": make_spec((1, 1), 512, (F16, F16), 256),
}
LENGTHS = [(1, n) for n in (0, 1, 33, 0, 64, 131, 0, 500, 0)]


@latin_square(2, "spec")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@parametrize_seed
@on_gpu_too
def test_decode(spec, seed):
    """Many blocks and few give the same result, from one compiled kernel."""
    for count in (FEW, 132):
        case = PagedBatch(spec, LENGTHS, seed)
        with multiprocessors(count):
            case.decode()
        case.verify()


@on_gpu_too
def test_no_sequences():
    case = PagedBatch(SPECS["8:2x128-f16-p16"], [(1, 0)] * 3, 0)
    case.decode()
    case.verify()


@on_gpu_too
def test_many_sequences():
    """Blocks find their sequences among more than 32, and again among those of one of 32 places."""
    lengths = [(1, n % 7 * (n % 3) + (900 if n == 71 else 0)) for n in range(1100)]
    case = PagedBatch(make_spec((1, 1), 8, page=4), lengths, 0)
    with multiprocessors(FEW):
        case.decode()
    case.verify()


def test_the_grid_is_what_the_device_holds():
    """Blocks of 69 KiB: three of them fit, but there are registers for two."""
    case = PagedBatch(SPECS["8:2x128-f16-p16"], LENGTHS, 0)
    for count in (1, 7):
        with multiprocessors(count), block_shared_bytes(163 * KIB), launches() as made:
            case.decode()
        assert [launch.grid for launch in made] == [(2 * count, 1, 1)] * 2


def test_a_third_stage_where_two_such_blocks_fit():
    """As many blocks as without it; where a block may have less, it has two stages."""
    spec = SPECS["8:2x128-f16-p16"]
    roomy, usual = DecodeTiling.choices(spec)
    assert (roomy.stages, usual.stages) == (3, 2)
    assert DecodeTiling.choices(SPECS["20:1x256-f32-p16"])[0].stages == 2
    for num_bytes, tiling in ((227 * KIB, roomy), (163 * KIB, usual), (LITTLE, usual)):
        case = PagedBatch(spec, LENGTHS, 0)
        with multiprocessors(FEW), block_shared_bytes(num_bytes), launches() as made:
            case.decode()
        case.verify()
        assert made[0].shared_bytes == tiling.num_bytes
        assert made[0].grid == (FEW * (1 if num_bytes == LITTLE else 2), 1, 1)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@parametrize_seed
def test_devices_with_little_shared_memory(spec, seed):
    case = PagedBatch(spec, LENGTHS, seed)
    with multiprocessors(FEW), block_shared_bytes(LITTLE):
        case.decode()
    case.verify()


def test_copies_of_a_pair_start_before_the_pair_before_it_is_stored():
    """States of the groups take the place of the last stage, and leave the first ones alone."""
    spec = SPECS["8:2x128-f16-p16"]
    for tiling in DecodeTiling.choices(spec):
        assert tiling.copies_beside_states
        first_stages = tiling.kv_groups * (tiling.stages - 1) * tiling.stage_bytes
        assert tiling.states_begin == tiling.q.num_bytes + first_stages
        states_bytes = tiling.kv_groups * tiling.state.num_bytes
        assert tiling.states_begin + states_bytes <= tiling.num_bytes
    kernels = re.split(r'extern "C" __global__ [^;{]*\{', cuda_text("decode", spec))[1:]
    attends = [text for text in kernels if "ptx_mma" in text]
    assert len(attends) == 2
    for text in attends:
        assert text.index("ptx_cp_async") < text.index("ptx_st_vec_global")


def test_a_skewed_batch_is_shared_out_as_evenly_as_an_even_one():
    """Every block reads as many bytes, and what is launched is the same."""
    spec = make_spec((8, 2), 128)
    num_blocks, num_sequences, pages = 8, 12, 6
    page_bytes = 2 * spec.page_size * spec.qk_head_dim * 2  # of one KV head
    q_bytes = spec.group_size * spec.qk_head_dim * 2  # of one KV head of a sequence
    skewed = [1] * (num_sequences - 1)
    skewed.insert(5, num_sequences * pages - sum(skewed))
    seen = []
    for num_pages in ([pages] * num_sequences, skewed):
        case = PagedBatch(spec, [(1, n * spec.page_size) for n in num_pages], 0)
        with multiprocessors(4), launches() as made:
            case.decode()
        case.verify()
        seen.append(made)
        share = num_sequences * pages * spec.num_kv_heads // num_blocks
        of_q = [copied - share * page_bytes for copied in made[0].copied_bytes]
        assert len(of_q) == num_blocks
        assert all(n % q_bytes == 0 and 0 < n <= 2 * num_sequences * q_bytes for n in of_q)
    assert seen[0] == seen[1]


@parametrize_seed
@on_gpu_too
def test_chunks(seed):
    """Rows are in the pages, or follow them; a chunk begins at the same position."""
    for is_past in (False, True):
        case = PagedBatch(SPECS["8:2x128-f16-p16"], LENGTHS, seed)
        case.q_positions += int(is_past)
        case.decode(window=-40)
        case.verify(not is_past, window=-40)


@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
@parametrize_seed
@on_gpu_too
def test_windows(inline, seed):
    spec = dataclasses.replace(
        SPECS["8:2x128-f16-p16"],
        logit_softcap=1.5,
        alibi_slopes=tuple(reference.alibi_slopes(8)),
    )
    case = PagedBatch(spec, LENGTHS, seed)
    case.decode(inline=inline, window=40)
    case.verify(inline=inline, window=40)
    gapped = [(1, 9, 2, 6, 6), (1, 1, 0, 0, 4), (1, 40, 0, 0, None), (1, 99, 5, 28, 9)]
    case = WindowBatch(spec, gapped, seed)
    case.run("decode", case.length_rows(4).reshape(-1), inline)
    case.verify(4, inline)
    case = WindowBatch(spec, gapped, seed)
    case.run("decode_windowed", case.length_rows(3), inline)
    case.verify(3, inline)


# --- waits and barriers -------------------------------------------------------------------------

# Groups of threads of one warp, and one of more: barriers of the warp, and of the block.
ROPE = RopeSpec(rotary_dim=16)
RACING = [make_spec((heads, 1), dim, page=8, rope=ROPE) for heads, dim in ((2, 64), (20, 192))]
CALLS = r" tvm_builtin_(?:cuda_(?:cta|warp)_sync|ptx_cp_async_wait_group\w+)\(\);"


def _wrong_schedules(source: str, spec, monkeypatch, num_bytes: int = 227 * KIB) -> list[str]:
    function = emulated(source).get_function("decode")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)

    def check():
        case = PagedBatch(spec, [(1, 400), (1, 30), (1, 150)], 0)
        with multiprocessors(FEW), block_shared_bytes(num_bytes):
            case.decode(inline=True)
        case.verify(inline=True)

    return wrong_schedules(check)


@pytest.mark.parametrize("spec", RACING, ids=["warps", "block"])
def test_every_schedule_gives_what_is_right(spec, monkeypatch):
    for num_bytes in (227 * KIB, LITTLE):
        assert not _wrong_schedules(cuda_text("decode", spec), spec, monkeypatch, num_bytes)


@pytest.mark.parametrize("place", every_nth(range(18), 6))
def test_no_wait_and_no_barrier_can_be_left_out(place, monkeypatch):
    """Each is missed by one of the specs at least: nine of three stages, nine of two."""
    for spec in RACING:
        source = cuda_text("decode", spec)
        calls = re.findall(CALLS, source)
        assert len(calls) == 18
        call = calls[place]
        text = mutated(source, call, which=calls[:place].count(call))
        if _wrong_schedules(text, spec, monkeypatch, 227 * KIB if place < 9 else LITTLE):
            return
    pytest.fail(f"nobody missed {call.strip()} number {place}")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
