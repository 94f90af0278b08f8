# SPDX-License-Identifier: Apache-2.0
"""Attention of many rows by four warps together (``wgmma``), emulated, against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tir_kernels.cuda.products import wgmma
from tir_kernels.gpu.tiles.shared_tiles import SlabLayout
from tir_kernels.gpu.tiles.tiling import MOST_ROWS, Tiling
from tir_kernels.spec import CudaTarget, RopeSpec

from .. import reference
from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels import attention_cases
from ..support.cases.kernels.attention_cases import (
    PagedBatch,
    RaggedBatch,
    altered_kernels,
    cuda_text,
    random_reach,
)
from ..support.cases.kernels.cuda_cases import BF16, F16, make_spec, parametrize_seed
from ..support.emulators.cuda_emulator import (
    emulated,
    is_right,
    launches,
    multiprocessors,
    mutated,
    wrong_schedules,
)
from ..support.emulators.cuda_emulator.device import plugged_in
from ..support.harness.mutated_source import Mistake
from ..support.harness.selections import few_of

HOPPER = CudaTarget("sm_90a")
SPECS = {
    "8:2x128-bf16-p16": make_spec((8, 2), 128, (BF16, BF16), target=HOPPER),
    "5:1x64-f16-p4": make_spec((5, 1), 64, page=4, target=HOPPER),
    "3:1x128-f16-p32": make_spec((3, 1), 128, page=32, target=HOPPER),  # rows of a thread differ
    "2:2x64-bf16-p1": make_spec((2, 2), 64, (BF16, BF16), 1, target=HOPPER),
}
LLAMA = SPECS["8:2x128-bf16-p16"]
SMALL = SPECS["5:1x64-f16-p4"]
# Tiles of rows that are full, that have a group of warps without rows, and of one row.
LONG = [(150, 231), (0, 5), (144, 144), (259, 260)]
parametrize_kinds = pytest.mark.parametrize("kind", [PagedBatch, RaggedBatch])


@pytest.fixture(autouse=True)
def small_gpu():
    """No tile is split."""
    with multiprocessors(1):
        yield


def _check(kind, spec, lengths, seed: int = 0, causal: bool = True, **how) -> None:
    case = kind(spec, lengths, seed)
    with launches() as made:
        case.prefill(causal, **how)
    assert made[0].threads > 128, "other kernels ran"
    case.verify(causal, **how)


@parametrize_kinds
@pytest.mark.parametrize("spec", few_of(SPECS.values(), 2), ids=SPECS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@parametrize_seed
def test_prefill(kind, spec, causal, seed):
    _check(kind, spec, LONG, seed, causal)


def test_few_rows_are_left_to_the_usual_kernels():
    case = PagedBatch(LLAMA, [(3, 70), (30, 131)], 0)
    with launches() as made:
        case.prefill()
    assert made[0].threads == 128
    case.verify()


@parametrize_kinds
@pytest.mark.parametrize("window", [40, 1000, -30])
@parametrize_seed
def test_sliding_windows(kind, window, seed):
    _check(kind, SMALL, LONG, seed, window=window)


@pytest.mark.parametrize("window", [None, 40])
@parametrize_seed
def test_spans(window, seed):
    case = PagedBatch(SMALL, LONG, seed)
    reach = random_reach(case.rng, case.num_rows)
    case.prefill(window=window, reach=reach)
    case.verify(window=window, reach=reach)


@parametrize_kinds
@parametrize_seed
def test_soft_cap_and_inline_rope(kind, seed):
    spec = dataclasses.replace(SMALL, logit_softcap=1.5, rope=RopeSpec(5e5, 0.25, 20))
    _check(kind, spec, [(150, 231), (97, 98)], seed, inline=True)


@pytest.mark.parametrize("sm_scale", [0.0, -0.3, 2.0])
def test_every_scale(sm_scale):
    """The softmax scales by positive factors only."""
    case = PagedBatch(SMALL, [(90, 140)], 0)
    case.sm_scale = sm_scale
    case.prefill()
    case.verify()


@parametrize_seed
def test_dropped_positions(seed):
    lengths = [(70, 230, 4, 13, 40), (150, 190, 70, 75, 9), (7, 7, 9, 9, 2)]
    case = WindowBatch(SMALL, lengths, seed)
    case.run("prefill", case.length_rows(4).reshape(-1), False, causal=True)
    case.verify(4, False)


@parametrize_kinds
@parametrize_seed
def test_columns_that_are_split(kind, seed):
    with multiprocessors(60):
        case = kind(SMALL, [(40, 1400)], seed)
        case.prefill()
    case.verify()


@parametrize_seed
def test_shared_prefix(seed):
    with multiprocessors(3), launches() as made:
        SharedBatch(SMALL, [(16, 5), (8, 0), (75, 90), (8, 64)], seed).check()
    assert made[0].threads > 128


@pytest.mark.parametrize("what", ["V", "K"])
def test_not_a_number_reaches_the_rows_that_see_it_only(what):
    case = PagedBatch(SMALL, [(90, 140)], 0)
    position = 100  # which rows 50 and later see
    page, slot = divmod(position, SMALL.page_size)
    case.pages[case.page_ids[page], "KV".index(what), 0, slot, 5] = np.nan
    case.prefill()
    is_nan = np.isnan(case.o.numpy().astype(np.float32)).any(axis=(1, 2))
    assert is_nan.tolist() == [row >= 50 for row in range(90)]


@pytest.mark.slow
def test_a_cache_on_a_gpu_of_the_family(monkeypatch):
    rng = np.random.default_rng(0)
    expected = reference.ReferenceCache(1, np.float16, reference.Rope(1e4, 1.0, 64), "normal")
    with plugged_in(monkeypatch, HOPPER) as device:
        config = pkv.KVCacheConfig(1, 8, 2, 64, dtype=F16, max_num_sequences=2,
                                   max_total_tokens=512, prefill_chunk_size=256)  # fmt: skip
        cache = pkv.create(config, device=device.device)
        for seq_id in range(2):
            cache.add_sequence(seq_id)
            expected.add_sequence(seq_id)
        for lengths in ([150, 40], [1, 90], [1, 1]):
            qkv = rng.standard_normal((sum(lengths), 12, 64), np.float32).astype(np.float16)
            with cache.forward([0, 1], lengths):
                out = cache.attention(0, qkv)
            want, _ = expected.attention(0, [0, 1], lengths, qkv, 2, 64**-0.5)
            reference.assert_close(out.numpy(), want, F16, f"rows {lengths}")


def test_other_specs_have_the_usual_tiles():
    for spec in (
        make_spec((4, 2), 80, target=HOPPER),
        make_spec((4, 2), (128, 64), target=HOPPER),
        make_spec((4, 2), 128, (F16, "int8"), target=HOPPER),
        make_spec((4, 2), 128),
    ):
        tilings = Tiling.choices(spec, spec.kv_dtype, MOST_ROWS)
        assert not any(tiling.by_warpgroups for tiling in tilings)


def test_slabs_have_each_chunk_once():
    layout = SlabLayout(96, 128, F16)
    offsets = {int(layout.offset(row, chunk)) for row in range(96) for chunk in range(16)}
    assert offsets == set(range(0, layout.num_bytes, 16))


# --- waits, fences and barriers -----------------------------------------------------------------

RACING = dataclasses.replace(SMALL, rope=RopeSpec(rotary_dim=16))


def _wrong_schedules(source: str, inline: bool, monkeypatch) -> list[str]:
    function = emulated(source).get_function("prefill")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)

    def check():
        case = PagedBatch(RACING, [(80, 300)], 0)
        case.prefill(inline=inline, causal=False)
        case.verify(inline=inline, causal=False)

    return wrong_schedules(check)


@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
def test_every_schedule_gives_what_is_right(inline, monkeypatch):
    assert not _wrong_schedules(cuda_text("prefill", RACING), inline, monkeypatch)


WAIT = "tvm_builtin_ptx_wgmma_wait_group_wait_group_sync_aligned_0();"
FENCE = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta();"


@pytest.mark.parametrize(
    "what, which, count, inline",
    [
        (WAIT, 0, 2, False),
        (WAIT, 1, 2, False),
        # Those behind Q come before others of the same threads, and that of a tile is the last one
        # unless its K is rotated.
        (FENCE, 2, 5, False),
        (FENCE, 4, 5, True),
    ],
    ids=["wait-scores", "wait-output", "fence-copies", "fence-rotation"],
)
def test_none_can_be_left_out(what, which, count, inline, monkeypatch):
    source = cuda_text("prefill", RACING)
    assert source.count(f" {what}") == count
    assert _wrong_schedules(mutated(source, f" {what}", which=which), inline, monkeypatch)


def paged() -> None:
    with multiprocessors(1):
        case = PagedBatch(LLAMA, [(60, 200)], 0)
        case.prefill()
        case.verify()


MISTAKES = [
    Mistake(paged, wgmma, "_low_word", "row * tiles", "0 * row * tiles"),
    Mistake(paged, wgmma, "_low_word", "from_slab_to_slab << 16", "1 << 16"),
    Mistake(paged, wgmma, "_step_of_row", "tiles.layout.slab_bytes", "0"),
    Mistake(paged, wgmma.WarpgroupProducts, "low_word", "stage *", "0 * stage *"),
    Mistake(paged, wgmma.WarpgroupProducts, "multiply_rows", "step != 0", "True"),
    Mistake(paged, wgmma.WarpgroupProducts, "multiply_columns", "True, 1, 1, 1", "False, 1, 1, 1"),
    Mistake(paged, wgmma.WarpgroupProducts, "multiply_columns", "step * 4 + i", "i"),
    Mistake(paged, SlabLayout, "offset", "slab * self.slab_bytes", "slab * 64"),
]


@pytest.fixture
def fresh_kernels():
    """Kernels that a test builds are forgotten."""
    with altered_kernels():
        yield


@pytest.mark.parametrize("mistake", few_of(MISTAKES, 4), ids=str)
def test_mistakes_are_found(mistake, monkeypatch, fresh_kernels):
    mistake.make(monkeypatch)
    assert not is_right(mistake.check)


def test_every_mistake_can_be_made(monkeypatch):
    """The sources still have the texts that the mistakes replace."""
    for mistake in MISTAKES:
        with monkeypatch.context() as undone:
            mistake.make(undone)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
