# SPDX-License-Identifier: Apache-2.0
"""What is not a number in what a query row sees comes out as NaN, and of no other row; emulated.

A row sees its Q, and K and V of the positions that its mask leaves. NaN and +inf in Q, NaN in K and
scores of +inf give NaN in `o` and `lse` of the row and head. NaN in V gives NaN in `o` and leaves
`lse` as it is, but in latent rows, where V is a part of K. A score of -inf is a weight of 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels.attention_cases import (
    PagedBatch,
    RaggedBatch,
    compiled,
    normal,
    tensors_for,
)
from ..support.cases.kernels.cuda_cases import BF16, F16, F32, make_spec, on_gpu_too
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.tree_cases import LatentTrees, PagedTrees, RaggedTrees, random_parents
from ..support.emulators.cuda_emulator import multiprocessors
from ..support.harness.selections import every_nth, few_of, latin_square

NONE = RopeSpec(rotary_dim=0)
SPECS = {
    "4:2x32-f16-p16": make_spec((4, 2), 32),
    "5:1x64-bf16-p4": make_spec((5, 1), 64, (BF16, BF16), 4),
    "4:2x32-f32-p16": make_spec((4, 2), 32, (F32, F32)),
}
MLA = {
    "5x64+16-f16-p4": make_spec((5, 1), (80, 64), (F16, F16), 4, kind="mla", rope=NONE),
    # V in two slices, which two blocks share out.
    "2x512+64-bf16-p16": make_spec((2, 1), (576, 512), (BF16, BF16), kind="mla", rope=NONE),
}
parametrize_specs = pytest.mark.parametrize("spec", few_of(SPECS.values(), 2), ids=SPECS)
parametrize_mla = pytest.mark.parametrize("spec", MLA.values(), ids=MLA)
# One block for each multiprocessor's share, and many, which split the columns of a row.
parametrize_splits = pytest.mark.parametrize("count", [2, 60], ids=["few-blocks", "many-blocks"])

K, V = 0, 1
LENGTHS = [(3, 20), (40, 300), (0, 9), (7, 30)]
PREFILLS = [
    ("4:2x32-f16-p16", PagedBatch, None, 2),
    pytest.param("4:2x32-f16-p16", PagedBatch, 40, 60, marks=pytest.mark.slow),
    pytest.param("5:1x64-bf16-p4", PagedBatch, None, 60, marks=pytest.mark.slow),
    ("5:1x64-bf16-p4", RaggedBatch, 40, 2),
    pytest.param("4:2x32-f32-p16", PagedBatch, 40, 2, marks=pytest.mark.slow),
    ("4:2x32-f32-p16", RaggedBatch, None, 60),
]
SEQUENCE = 1  # where NaN lies: one with several tiles of rows and of positions
DECODES = [(1, 20), (1, 600), (1, 40)]


def states(monkeypatch, verify: Callable) -> dict:
    """What `verify` compares: "o" and "lse" -> what came and what was expected."""
    seen = {}

    def keep(actual, expected, *dtypes, **how):
        for what, *pair in zip(("o", "lse"), actual, expected, strict=True):
            seen[what] = tuple(np.asarray(x, np.float64) for x in pair)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "assert_state_close", keep)
        verify()
    return seen


def row_of(case, plane: int, position: int, head: int = 0) -> np.ndarray:
    """K or V of a position of `SEQUENCE`: a view."""
    if isinstance(case, RaggedBatch):
        return (case.k, case.v)[plane][case.kv_indptr[SEQUENCE] + position, head]
    entry, offset = divmod(position, case.spec.page_size)
    page = case.page_ids[case.page_indptr[SEQUENCE] + entry]
    if case.spec.kind == "mla":
        width = (case.spec.qk_head_dim, case.spec.v_head_dim)[plane]
        return case.pages[page, offset, :width]
    return case.pages[page, plane, head, offset]


def with_positive_scores(case):
    """The batch with positive elements 3 in K, so that +inf there in Q gives scores of +inf."""
    k = case.k if isinstance(case, RaggedBatch) else case.pages
    at = (Ellipsis, 3) if k.ndim < 5 else (slice(None), K, Ellipsis, 3)
    k[at] = np.abs(k[at])
    return case


def check(monkeypatch, make: Callable, run: Callable, verify: Callable, positions) -> None:
    """Poison one thing after the other of what ``make()`` returns, and compare what comes out.

    Parameters
    ----------
    run, verify : callables that take the batch.
    positions : sequence of int
        Where K and V of a sequence hold what is not a number.
    """

    def outcome(poison: Callable, nans: np.ndarray, clean: dict, lse_too: bool = True) -> None:
        case = with_positive_scores(make())
        poison(case)
        run(case)
        got = {what: pair[0] for what, pair in states(monkeypatch, lambda: verify(case)).items()}
        assert nans.any() and not nans.all()
        assert np.isnan(got["o"][nans]).any(-1).all()
        dtype = reference.coarsest(case.spec.dtype, case.spec.kv_dtype)
        of_lse = nans if lse_too else np.zeros_like(nans)
        assert np.isnan(got["lse"][of_lse]).all()
        reference.assert_close(got["lse"][~of_lse], clean["lse"][~of_lse], dtype, "lse")
        reference.assert_close(got["o"][~nans], clean["o"][~nans], dtype, "o")

    def expected(poison: Callable = lambda case: None) -> dict:
        case = with_positive_scores(make())
        poison(case)
        return {what: x[1] for what, x in states(monkeypatch, lambda: verify(case)).items()}

    clean = expected()
    first_row, is_latent = make().query_indptr[SEQUENCE], make().spec.kind == "mla"
    for value in (np.nan, np.inf):
        nans = np.zeros(clean["lse"].shape, bool)
        nans[first_row, 1] = True

        def poison_q(case, value=value):
            case.q[first_row, 1, 3] = value

        outcome(poison_q, nans, clean)
    for position in positions:

        def poison_k(case, position=position):
            row_of(case, K, position)[3] = np.nan

        def poison_v(case, position=position):
            row_of(case, V, position)[5] = np.nan

        nans = np.isnan(expected(poison_k)["lse"])
        outcome(poison_k, nans, clean)
        outcome(poison_v, nans, clean, lse_too=is_latent)

    def give_scores_of_inf(case, sign: float = 1.0):
        case.q[..., 0] = 1.0
        row_of(case, K, positions[0])[0] = sign * np.inf
        if case.spec.kind == "mla":
            row_of(case, K, positions[0])[0] = 0
            case.q[..., -1] = 1.0
            row_of(case, K, positions[0])[-1] = sign * np.inf

    def let_q_be(case):
        case.q[..., 0] = 1.0
        if case.spec.kind == "mla":
            case.q[..., -1] = 1.0
            row_of(case, K, positions[0])[0] = 0

    def poison_k(case):
        let_q_be(case)
        row_of(case, K, positions[0])[:] = np.nan

    nans = np.isnan(expected(poison_k)["lse"])
    outcome(give_scores_of_inf, nans, expected(let_q_be))


@latin_square(2, "spec", "window", "count")
@parametrize_specs
@pytest.mark.parametrize("window, count", [(None, 2), (None, 60), (40, 2)])
@on_gpu_too
def test_decode(spec, window, count, monkeypatch):
    with multiprocessors(count):
        check(
            monkeypatch,
            lambda: PagedBatch(spec, DECODES, 0),
            lambda case: case.decode(window=window),
            lambda case: case.verify(window=window),
            [580],
        )


@pytest.mark.parametrize("name, kind, window, count", PREFILLS)
@on_gpu_too
def test_prefill(name, kind, window, count, monkeypatch):
    """Some rows of a tile see the position with NaN, and others do not."""
    spec = SPECS[name]
    with multiprocessors(count):
        check(
            monkeypatch,
            lambda: kind(spec, LENGTHS, 0),
            lambda case: case.prefill(window=window),
            lambda case: case.verify(window=window),
            [270, 299],
        )


@on_gpu_too
def test_rows_that_see_everything(monkeypatch):
    check(
        monkeypatch,
        lambda: PagedBatch(SPECS["4:2x32-f16-p16"], LENGTHS, 0),
        lambda case: case.prefill(causal=False),
        lambda case: case.verify(causal=False),
        [0, 299],
    )


@parametrize_specs
@on_gpu_too
def test_gaps(spec, monkeypatch):
    """Rows see the sinks and the columns behind the gap."""
    sequences = [(1, 9, 2, 6, 6), (30, 200, 5, 28, 40), (2, 40, 0, 0, None)]
    check(
        monkeypatch,
        lambda: WindowBatch(spec, sequences, 0),
        lambda case: case.run("prefill", case.length_rows(4).reshape(-1), False, True),
        lambda case: case.verify(4, False),
        [180, 3, 150],
    )


@latin_square(2, "spec", "window")
@parametrize_specs
@pytest.mark.parametrize("window", [None, 12], ids=["whole", "window"])
@on_gpu_too
def test_trees(spec, window, monkeypatch):
    rng = np.random.default_rng(0)
    trees = [(1, 9, [-1]), (40, 30, random_parents(rng, 50)), (6, 40, [])]
    for kind in (PagedTrees, RaggedTrees):
        given = [
            (n, before if kind is PagedTrees else len(p) or before, p) for n, before, p in trees
        ]
        last = 30 + 50 if kind is PagedTrees else 50
        check(
            monkeypatch,
            lambda kind=kind, given=given: kind(spec, given, 0),
            lambda case: case.run(window=window),
            lambda case: case.verify(window=window),
            [last - 38, last - 1],
        )


@latin_square(2, "spec", "count")
@parametrize_mla
@parametrize_splits
@on_gpu_too
def test_mla(spec, count, monkeypatch):
    with multiprocessors(count):
        check(
            monkeypatch,
            lambda: LatentBatch(spec, [(3, 20), (24, 200), (1, 9)], 0),
            LatentBatch.run,
            LatentBatch.verify,
            [180, 199],
        )


@parametrize_mla
@on_gpu_too
def test_mla_trees(spec, monkeypatch):
    trees = [(1, 9, [-1]), (20, 30, random_parents(np.random.default_rng(0), 20))]
    check(
        monkeypatch,
        lambda: LatentTrees(spec, trees, 0),
        LatentTrees.run,
        LatentTrees.verify,
        [35, 49],
    )


@latin_square(6, "spec", "count")
@pytest.mark.parametrize("spec", every_nth([*SPECS.values(), *MLA.values()], 2), ids=[*SPECS, *MLA])
@parametrize_splits
@on_gpu_too
def test_shared_prefix(spec, count):
    """In the pages, in Q, and in the state that was there, whose weight may be next to nothing."""
    segments = [(2, 5), (-(-300 // spec.page_size), 20), (1, 70)]

    def outcome(poison: Callable, nans: np.ndarray, lse_too: bool = True) -> None:
        poison(case)
        case.run()
        o, lse = case.merged
        assert np.isnan(o[nans].astype(np.float32)).any(-1).all()
        np.testing.assert_array_equal(np.isnan(lse), nans if lse_too else np.zeros_like(nans))
        nans = nans | case.nothing_seen & ~in_segments[:, None]
        assert not np.isnan(o[~nans].astype(np.float32)).any()

    for plane in (K, V):
        case = SharedBatch(spec, segments, 0)
        rows = case.row_ids[case.row_indptr[1] : case.row_indptr[2]]
        in_segments = np.isin(np.arange(len(case.q)), case.row_ids)
        nans = np.zeros(case.lse.shape, bool)
        nans[rows, : spec.group_size] = True

        def poison_pages(case, plane=plane):
            row_of(case, plane, 250)[5] = np.nan

        outcome(poison_pages, nans, plane == K or spec.kind == "mla")
    for name in ("q", "lse", "o", "o of next to no weight"):
        case = SharedBatch(spec, segments, 0)
        rows = case.row_ids[case.row_indptr[1] : case.row_indptr[2]]
        row = next(row for row in rows if not case.nothing_seen[row, 1])
        nans = np.zeros(case.lse.shape, bool)
        nans[row, 1] = True

        def poison_state(case, name=name, row=row):
            getattr(case, name[:1] if name != "lse" else name)[row, 1, ...] = np.nan
            if name.endswith("weight"):
                case.lse[row, 1] = -1e5

        outcome(poison_state, nans, name in ("q", "lse"))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@on_gpu_too
def test_merge_and_sinks(dtype):
    """NaN and +inf in an lse, and NaN in an o, come out; an o whose lse is -inf does not count."""
    spec, rng = make_spec((3, 1), 40, (dtype, dtype)), np.random.default_rng(0)
    lses = [np.zeros((8, 3), np.float32) for _ in range(2)]
    os = [normal(rng, (8, 3, 40), dtype) for _ in range(2)]
    lses[0][0, 0], lses[1][1, 1], lses[0][2, 2], lses[1][3, 0] = np.nan, np.nan, np.inf, np.inf
    lses[0][4], lses[1][4] = [np.nan, -np.inf, -np.inf], [-np.inf, np.nan, -np.inf]
    os[0][4, 2] = os[1][4, 2] = np.nan
    os[0][5, 0, 7] = os[1][6, 1, 7] = np.nan
    lses[0][5, 0] = lses[1][6, 1] = -500.0  # it weighs less than float32 can tell
    of_lse = np.zeros((8, 3), bool)
    for at in ((0, 0), (1, 1), (2, 2), (3, 0), (4, 0), (4, 1)):
        of_lse[at] = True
    of_o = of_lse.copy()
    of_o[5, 0] = of_o[6, 1] = True
    tensor = tensors_for(spec)
    actual = [tensor(x) for x in (os[0], lses[0], os[1], lses[1])]
    compiled("merge", spec)(*actual)
    o, lse = (x.numpy().astype(np.float32) for x in actual[:2])
    np.testing.assert_array_equal(np.isnan(lse), of_lse)
    np.testing.assert_array_equal(np.isnan(o).any(-1), of_o)
    assert (o[4, 2] == 0).all() and lse[4, 2] == -np.inf

    actual = tensor(os[0]), tensor(lses[0])
    compiled("apply_sinks", spec)(*actual, tensor(np.array([0.5, -np.inf, 3.0], np.float32)))
    o, lse = (x.numpy().astype(np.float32) for x in actual)
    bad = np.isnan(lses[0]) | (lses[0] == np.inf)
    np.testing.assert_array_equal(np.isnan(lse), bad)
    bad[5, 0] = True
    np.testing.assert_array_equal(np.isnan(o).any(-1), bad)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
