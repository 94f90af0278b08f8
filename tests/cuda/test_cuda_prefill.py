# SPDX-License-Identifier: Apache-2.0
"""Attention of several rows per sequence on tensor cores, emulated, against the reference."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from tir_kernels.gpu.tiles.tiling import MAX_ROWS
from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels import attention_cases
from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch, cuda_text, random_reach
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.kernel_specs import YARN
from ..support.emulators.cuda_emulator import (
    SCHEDULES,
    emulated,
    launches,
    multiprocessors,
    mutated,
    schedule,
    wrong_schedules,
)
from ..support.harness.selections import every_nth, with_slow

SPECS = {
    "8:2x128-f16-p16": make_spec((8, 2), 128),
    "5:1x80-bf16-p4": make_spec((5, 1), 80, (BF16, BF16), 4),
    "2:2x64-f16-p1": make_spec((2, 2), 64, page=1),
    "71:1x24-f16-p256": make_spec((71, 1), 24, page=256),
    "3:1x256-bf16-p32": make_spec((3, 1), 256, (BF16, BF16), 32),
    "1:1x576-f16-p2": make_spec((1, 1), 576, (F16, F16), 2),
    "8:2x64-f32-p16": make_spec((8, 2), 64, (F32, F32)),
    "3:1x128-f32-bf16-p1": make_spec((3, 1), 128, (F32, BF16), 1),
    "5:1x80-f16-f32-p8": make_spec((5, 1), 80, (F16, F32), 8),
    "2:1x576-f32-p16": make_spec((2, 1), 576, (F32, F32)),
}
# Other widths with types that the rest has.
REPEATED = tuple(SPECS[name] for name in ("2:2x64-f16-p1", "1:1x576-f16-p2", "3:1x128-f32-bf16-p1"))
WHOLE_F32 = SPECS["8:2x64-f32-p16"]
SMALL = SPECS["5:1x80-bf16-p4"]
# Nothing cached; a prefix; empty sequences at the start, in the middle and at the end; rows without
# anything to see; several tiles of either kind.
MIXED = [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (4, 6), (70, 131), (0, 0)]
parametrize_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
parametrize_kinds = pytest.mark.parametrize("kind", [PagedBatch, RaggedBatch])


@pytest.fixture(autouse=True)
def small_gpu():
    """No tile is split: `test_cuda_prefill_split` is for those that are."""
    with multiprocessors(1):
        yield


def _check(kind, spec, lengths, seed: int = 0, causal: bool = True, **how) -> None:
    case = kind(spec, lengths, seed)
    case.prefill(causal, **how)
    case.verify(causal, **how)


@pytest.mark.parametrize("spec", with_slow(SPECS.values(), *REPEATED), ids=SPECS)
@parametrize_causal
@parametrize_seed
@on_gpu_too
def test_prefill(spec, causal, seed):
    _check(PagedBatch, spec, MIXED, seed, causal)


@pytest.mark.parametrize(
    "heads, dims, dtype",
    [((4, 2), (192, 128), F16), ((3, 3), (24, 104), BF16), ((2, 1), (64, 80), F16)],
    ids=["192/128", "24/104", "64/80"],
)
@parametrize_causal
@parametrize_seed
@on_gpu_too
def test_prefill_ragged(heads, dims, dtype, causal, seed):
    _check(RaggedBatch, make_spec(heads, dims, (dtype, dtype)), MIXED, seed, causal)


@on_gpu_too
def test_bounds_beside_those_of_tiles():
    """The columns that all rows see end at every place of a tile."""
    _check(PagedBatch, make_spec((1, 1), 16), [(2, n) for n in range(60, 130)])


@on_gpu_too
def test_windows_beside_the_bounds_of_tiles():
    """They are longer than a tile; the first one that some rows see only begins with it."""
    lengths = [(n, 240) for n in (1, 2, 3, 64, 65, 66, 67)]
    _check(PagedBatch, make_spec((1, 1), 16), lengths, window=100)


def test_many_sequences():
    """Blocks find their sequences, more than a warp has lanes, and some that are empty."""
    lengths = [(n % 3, n % 3 + n % 5) for n in range(70)]
    case = PagedBatch(make_spec((2, 1), 16, page=4), lengths, 0)
    with launches() as made:
        case.prefill()
    case.verify()
    rows = sum(n for n, _ in lengths)
    assert made[0].grid == (2 * rows // MAX_ROWS + len(lengths), 1, 1)


@parametrize_kinds
@pytest.mark.parametrize("window", [1, 17, 64, 1000, -30])
@parametrize_seed
@on_gpu_too
def test_sliding_windows(kind, window, seed):
    _check(kind, SMALL, MIXED, seed, window=window)


@pytest.mark.parametrize("window", [None, 40, -64])
@parametrize_seed
@on_gpu_too
def test_spans(window, seed):
    """Rows see to the end of their span, across tiles of rows and of columns."""
    case = PagedBatch(SMALL, MIXED, seed)
    reach = random_reach(case.rng, case.num_rows)
    case.prefill(window=window, reach=reach)
    case.verify(window=window, reach=reach)


@pytest.mark.parametrize("kind", [PagedBatch, RaggedBatch])
@parametrize_seed
@on_gpu_too
def test_float32_with_everything(kind, seed):
    slopes = tuple(reference.alibi_slopes(8))
    spec = dataclasses.replace(WHOLE_F32, logit_softcap=1.5, alibi_slopes=slopes)
    _check(kind, spec, MIXED, seed, window=40, inline=True)


@parametrize_kinds
@parametrize_seed
@on_gpu_too
def test_soft_cap(kind, seed):
    _check(kind, dataclasses.replace(SMALL, logit_softcap=1.5), MIXED, seed)


@parametrize_kinds
@parametrize_seed
@on_gpu_too
def test_alibi(kind, seed):
    spec = dataclasses.replace(SMALL, alibi_slopes=tuple(reference.alibi_slopes(5)))
    _check(kind, spec, MIXED, seed)


ROPES = {
    "whole": RopeSpec(rotary_dim=80),
    "partial-scaled": RopeSpec(5e5, 0.25, 20),
    "yarn": RopeSpec(1e4, 1.0, 80, YARN),
    "odd-pairs": RopeSpec(1e4, 1.0, 22),
}


@pytest.mark.parametrize("rope", every_nth(ROPES.values(), 2), ids=ROPES)
@parametrize_seed
@on_gpu_too
def test_inline_rope(rope, seed):
    spec = dataclasses.replace(SMALL, rope=rope)
    for kind in (PagedBatch, RaggedBatch):
        _check(kind, spec, [(3, 70), (2, 2), (17, 30)], seed, inline=True)


@parametrize_seed
@on_gpu_too
def test_inline_longrope_chooses_factors_by_sequence(seed):
    scaling = (
        ("long_factor", tuple(1.0 + i for i in range(16))),
        ("original_max_position_embeddings", 64),
        ("max_position_embeddings", 256),
        ("rope_type", "longrope"),
        ("short_factor", tuple(1.0 + 0.1 * i for i in range(16))),
    )
    spec = make_spec((4, 2), 32, rope=RopeSpec(1e4, 1.0, 32, scaling))
    _check(PagedBatch, spec, [(6, 64), (3, 70), (2, 2)], seed, inline=True)


# Of each sequence: rows of the step, slots, sinks, slot behind the gap, positions before a row.
GAPPED = [
    *((3, 9, 2, 5, 2), (1, 30, 5, 28, 9), (4, 4, 1, 1, 1), (7, 7, 9, 9, 2)),
    *((70, 230, 4, 13, 40), (5, 90, 70, 75, 9), (2, 100, 3, 4, None)),
]


@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
@parametrize_seed
@on_gpu_too
def test_windows_of_sequences(inline, seed):
    for spec in (SMALL, WHOLE_F32):
        case = WindowBatch(spec, GAPPED, seed)
        case.run("prefill", case.length_rows(4).reshape(-1), inline, causal=True)
        case.verify(4, inline)
    case = WindowBatch(SMALL, GAPPED, seed)
    case.run("prefill_windowed", case.length_rows(3), inline, causal=True)
    case.verify(3, inline)


@parametrize_seed
@on_gpu_too
def test_more_rows_than_positions(seed):
    case = PagedBatch(SMALL, [(5, 3), (70, 10), (2, 0), (99, 1)], seed)
    case.prefill()
    case.verify()
    case = WindowBatch(SMALL, [(5, 3, 0, 0, None), (70, 10, 2, 2, 4), (99, 1, 0, 0, 1)], seed)
    case.run("prefill", case.length_rows(4).reshape(-1), False, causal=True)
    case.verify(4, False)


def test_another_rotation_than_the_baked_one_is_refused():
    case = PagedBatch(SMALL, [(1, 4)], 0)
    mode, scale, theta, sm_scale = case.scalars(causal=None, inline=True)
    case.scalars = lambda causal, inline: [1, mode, scale, 2 * theta, sm_scale]
    with pytest.raises(ValueError, match="rope_theta"):
        case.prefill()


def test_a_wrong_shape_is_told_by_the_name_of_its_argument():
    case = PagedBatch(SMALL, [(1, 5)], 0)
    case.q = case.q[:, :3]
    with pytest.raises(ValueError, match=r"q\.shape\[1\]"):
        case.prefill()


# --- waits and barriers -------------------------------------------------------------------------

# Both rotate K. One keeps Q in registers; the other reads it from shared memory to the end, and
# puts O in its place, in another layout.
RACING = [make_spec((2, 1), dims, rope=RopeSpec(rotary_dim=16)) for dims in ((32, 64), (80, 64))]
BARRIER = "tvm_builtin_cuda_cta_sync();"
WAIT = "tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0();"


def _wrong_schedules(source: str, spec, monkeypatch) -> list[str]:
    function = emulated(source).get_function("prefill_ragged")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)

    def check():
        case = RaggedBatch(spec, [(70, 200)], 0)
        case.prefill(inline=True, causal=False)  # so that all warps have work to the end
        case.verify(inline=True, causal=False)

    return wrong_schedules(check)


@pytest.mark.parametrize("spec", RACING, ids=["registers", "shared"])
def test_every_schedule_gives_what_is_right(spec, monkeypatch):
    assert not _wrong_schedules(cuda_text("prefill_ragged", spec), spec, monkeypatch)


# The barriers in the order of the source. In `_LAST` are the one behind the last tile and the one
# before a block looks whether a row needs care: with one span, either of them does for both. Those
# in `_CARE` are for V that is not finite.
_CARE, _LAST = (3, 7), (5, 6)
LEFT_OUT = {BARRIER: (9, [(0,), (1,), (2,), (4,), _LAST, (8,)]), WAIT: (2, [(0,), (1,)])}


@pytest.mark.parametrize("what", with_slow(LEFT_OUT, BARRIER), ids=["barriers", "waits"])
def test_none_can_be_left_out(what, monkeypatch):
    """Each is missed by one of the specs at least."""
    (count, all_places), missed = LEFT_OUT[what], set()
    for spec in RACING:
        source = cuda_text("prefill_ragged", spec)
        assert source.count(f" {what}") == count
        for places in all_places:
            text = source
            for which in reversed(places):
                text = mutated(text, f" {what}", which=which)
            if _wrong_schedules(text, spec, monkeypatch):
                missed.add(places)
    assert missed == set(all_places)


def _wrong_with_nan(source: str, spec, monkeypatch) -> bool:
    """Whether NaN in V at a position that some rows of a tile see reaches others, or gets lost."""
    function = emulated(source).get_function("prefill_ragged")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)
    for chosen in SCHEDULES:
        case = RaggedBatch(spec, [(70, 200)], 0)
        case.v[190:, :, 3] = np.nan
        try:
            with schedule(chosen):
                case.prefill()
        except RuntimeError:  # threads of a block do not agree about the way to go on
            return True
        is_nan = np.isnan(case.o.numpy().astype(np.float32)).all(-1)
        if not np.array_equal(is_nan[:, 0], np.arange(70) >= 60):
            return True
        if not np.isfinite(case.lse.numpy()).all():
            return True
    return False


def test_no_barrier_of_care_can_be_left_out(monkeypatch):
    spec = RACING[0]
    source = cuda_text("prefill_ragged", spec)
    assert not _wrong_with_nan(source, spec, monkeypatch)
    for which in _CARE:
        text = mutated(source, f" {BARRIER}", which=which)
        assert _wrong_with_nan(text, spec, monkeypatch), which


def test_a_branch_before_matrix_instructions_is_caught(monkeypatch):
    """PTX does not promise that the threads of a warp come together again behind a branch."""
    spec = next(iter(SPECS.values()))
    source = cuda_text("prefill", spec)
    # Each thread decides for itself whether to scale its rows, instead of all by a vote.
    alone = re.sub(r"\w+any_sync\(\(uint\)4294967295, ", "(", source)
    assert alone != source
    function = emulated(alone).get_function("prefill")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)
    case = PagedBatch(spec, MIXED, 0)
    case.sm_scale = 10.0  # the maximum of some rows grows much from tile to tile
    with pytest.raises(RuntimeError, match="ldmatrix.aligned in a warp whose threads took other"):
        case.prefill(True)


def test_uneven_copies_keep_a_warp_together(monkeypatch):
    """With heads of 80, only some threads of a warp copy the last chunks of a row."""
    source = cuda_text("prefill", SMALL)
    function = emulated(mutated(source, " tvm_builtin_cuda_warp_sync();", which=0))
    function = function.get_function("prefill")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)
    with pytest.raises(RuntimeError, match="ldmatrix.aligned in a warp whose threads took other"):
        PagedBatch(SMALL, MIXED, 0).prefill(True)


@pytest.mark.parametrize("spec", [SPECS["8:2x128-f16-p16"], WHOLE_F32], ids=["f16", "f32"])
def test_scores_far_below_zero_count(spec):
    """Finite scores weigh what they weigh, however small all of them are."""
    case = PagedBatch(spec, [(1, 33), (70, 131)], 0)
    case.q[:], case.pages[:, 0] = -1, 1  # so all scores are equal
    case.sm_scale = 1e33
    case.prefill(True)
    case.verify(True)
    assert np.isfinite(case.lse.numpy()).all()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
