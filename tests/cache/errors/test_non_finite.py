# SPDX-License-Identifier: Apache-2.0
"""NaN and infinities in Q, K and V against the reference, for every attention kernel on the CPU.

What a row sees decides about it, and nothing else does: `reference_attention` says how. So NaN and
infinities are put into query rows and into K and V of single positions, which some rows see and
their neighbours do not, and results are compared with the reference, NaN for NaN.
"""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler.build import vector_target

from ... import reference
from ...kernels.test_shared_prefix_kernel import SharedBatch
from ...kernels.test_window_kernels import WindowBatch
from ...support.cases.kernels.attention_cases import (
    PagedBatch,
    RaggedBatch,
    compiled,
    normal,
    tensor,
)
from ...support.cases.kernels.kernel_specs import (
    BF16,
    F16,
    F32,
    make_spec,
    other_cpu,
    parametrize_seed,
)
from ...support.cases.kernels.mla_cases import LatentBatch
from ...support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ...support.cases.kernels.tree_cases import (
    LatentTrees,
    PagedTrees,
    RaggedTrees,
    chain,
    random_parents,
)
from ...support.harness.selections import latin_square

NAN, INF = float("nan"), float("inf")
# (rows of the step, positions): alone and in tiles, rows that see nothing, cuts of the positions.
DECODE = [(1, 0), (1, 1), (1, 33), (1, 2), (1, 128), (1, 900), (1, 5)]
PREFILL = [(3, 70), (0, 33), (2, 0), (65, 150), (1, 130), (4, 6), (1, 1), (2, 2)]
# rows, columns before the tree, parents
TREES = [
    (3, 0, [-1, 0, 0]),
    (5, 70, random_parents(np.random.default_rng(1), 9)),
    (40, 3, random_parents(np.random.default_rng(2), 40)),
    (3, 60, []),
    (4, 20, chain(6)),
]
WINDOW = 20
# As in test_window_kernels.
WINDOWS = {
    "decode": [(1, 9, 2, 6, 6), (1, 40, 0, 0, None), (1, 30, 5, 28, 9), (1, 90, 66, 68, 21)],
    "prefill": [(3, 9, 2, 5, 2), (1, 30, 5, 28, 9), (30, 300, 4, 13, 40), (1, 200, 0, 0, None)],
}

PAIRS = make_spec((4, 2), 32, (BF16, BF16))
SPECS = {
    "f32": make_spec((6, 2), 24),
    "f16-p1": make_spec((4, 2), 40, (F16, F16), 1),
    "bf16": PAIRS,
    "f32-bf16-p64": make_spec((5, 1), 16, (F32, BF16), 64),
    "cap": make_spec((4, 2), 16, logit_softcap=3.0),
    "alibi-bf16": make_spec((4, 2), 32, (BF16, BF16), alibi_slopes=(0.5, 0.25, 0.1, 0.01)),
}
PLAIN = {name: SPECS[name] for name in ("f32", "f16-p1", "bf16")}
MLA_SPECS = {
    "f32": make_mla_spec(3, (24, 8)),
    "bf16": make_mla_spec(4, (64, 16), (BF16, BF16), 4),
}

# kernel -> (specs, ``(spec, seed) -> case``, run and compare)
FAMILIES = {
    "decode": (SPECS, lambda s, seed: PagedBatch(s, DECODE, seed), "decode", {}),
    "decode-inline": (PLAIN, lambda s, seed: PagedBatch(s, DECODE, seed), "decode", {"inline": 1}),
    "decode_sliding": (
        PLAIN, lambda s, seed: PagedBatch(s, DECODE, seed), "decode", {"window": WINDOW},
    ),
    "prefill": (SPECS, lambda s, seed: PagedBatch(s, PREFILL, seed), "prefill", {}),
    "prefill-full": (
        PLAIN, lambda s, seed: PagedBatch(s, PREFILL, seed), "prefill", {"causal": False},
    ),
    "prefill-inline": (
        PLAIN, lambda s, seed: PagedBatch(s, PREFILL, seed), "prefill", {"inline": 1},
    ),
    "prefill_sliding": (
        PLAIN, lambda s, seed: PagedBatch(s, PREFILL, seed), "prefill", {"window": WINDOW},
    ),
    "prefill_ragged": (PLAIN, lambda s, seed: RaggedBatch(s, PREFILL, seed), "prefill", {}),
    "prefill_ragged_sliding": (
        {"bf16": PAIRS}, lambda s, seed: RaggedBatch(s, PREFILL, seed), "prefill",
        {"window": WINDOW},
    ),
    "tree_paged": (PLAIN, lambda s, seed: PagedTrees(s, TREES, seed), "run", {}),
    "tree_paged_sliding": (
        PLAIN, lambda s, seed: PagedTrees(s, TREES, seed), "run", {"window": 4},
    ),
    "tree": (
        PLAIN,
        lambda s, seed: RaggedTrees(s, [(n, c + len(p), p) for n, c, p in TREES if p], seed),
        "run", {},
    ),
    "mla_prefill": (MLA_SPECS, lambda s, seed: LatentBatch(s, PREFILL, seed), "run", {}),
    "mla_tree": (MLA_SPECS, lambda s, seed: LatentTrees(s, TREES, seed), "run", {}),
}  # fmt: skip
CASES = [
    pytest.param(spec, *family, id=f"{name}-{label}")
    for name, (specs, *family) in FAMILIES.items()
    for label, spec in specs.items()
]
# V of MLA layers is a part of K.
SOURCES_OF_CASES = [
    pytest.param(*case.values, source, id=f"{case.id}-{source}")
    for case in CASES
    for source in ("q", "k", "v")
    if source != "v" or case.values[0].kind != "mla"
]
VALUES = {"nan": NAN, "inf": INF, "minus_inf": -INF}
SOURCES = ("q", "k", "v")
parametrize_values = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def kv_rows(case, b: int, position: int) -> tuple[np.ndarray, np.ndarray]:
    """K ``[Hk, Dqk]`` and V ``[Hk, Dv]`` of a position, to be written to."""
    if isinstance(case, RaggedBatch):
        row = case.kv_indptr[b] + position
        return case.k[row], case.v[row]
    page_size = case.spec.page_size
    page = case.page_ids[case.page_indptr[b] + position // page_size]
    if case.spec.kind == "mla":
        row = case.pages[page, None, position % page_size]
        return row, row[:, : case.spec.v_head_dim]
    k, v = case.pages[page, :, :, position % page_size]
    return k, v


def put(case, source: str, value: float) -> None:
    """Write `value` to an element of some rows: of one head each, in half of the sequences."""
    rng = case.rng
    if source == "q":
        for row in rng.choice(len(case.q), len(case.q) * 3 // 4, replace=False):
            case.q[row, rng.integers(case.q.shape[1]), rng.integers(case.q.shape[2])] = value
        return
    for b in range(0, len(case.kv_lens), 2):
        kv_len = case.kv_lens[b]
        # The last positions are those that some rows of a step see and others do not.
        late = kv_len - 1 - rng.integers(0, max(1, min(kv_len, 30)), 2)
        for position in {*late, rng.integers(0, max(1, kv_len))} if kv_len else ():
            rows = kv_rows(case, b, position)[SOURCES.index(source) - 1]
            rows[rng.integers(rows.shape[0]), rng.integers(rows.shape[1])] = value


def take_infinity_for_nan(case) -> None:
    """Infinity in V may give either: a kernel may add products of 0 with what a row sees."""

    def check(expected, *dtypes):
        dtype = reference.coarsest(*dtypes)
        actual = case.state()
        pairs = (np.asarray(x, np.float64) for x in (actual[0], expected[0]))
        o, want = (np.where(np.isfinite(x), x, NAN) for x in pairs)
        how = {"rounds_qk": case.is_inline}
        reference.assert_state_close((o, actual[1]), (want, expected[1]), dtype, **how)

    case.compare = check


@latin_square(2, "value", "source")
@parametrize_values
@pytest.mark.parametrize("spec, make, run, options, source", SOURCES_OF_CASES)
@parametrize_seed
def test_attention(spec, make, run, options, source, value, seed):
    case = make(spec, seed)
    put(case, source, value)
    if source == "v" and np.isinf(value):
        take_infinity_for_nan(case)
    with np.errstate(invalid="ignore"):
        getattr(case, run)(**options)
        case.verify(**options)
    o, lse = case.o.numpy().astype(np.float32), case.lse.numpy()
    assert np.isfinite(o).any(), "nothing but NaN would tell nothing"
    if value != -INF and not (spec.logit_softcap and value == INF):
        assert not np.isfinite(o).all() and np.isnan(lse).any() == (source != "v")


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize("spec", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("source", SOURCES)
@parametrize_values
def test_windows_of_sequences(name, spec, value, source):
    case = WindowBatch(spec, WINDOWS[name], 0)
    put(case, source, value)
    if source == "v" and np.isinf(value):
        take_infinity_for_nan(case)
    causal = None if name == "decode" else True
    with np.errstate(invalid="ignore"):
        case.run(name, case.length_rows(4).reshape(-1), False, causal=causal)
        case.verify(4, False)


@pytest.mark.parametrize(
    "spec",
    [*PLAIN.values(), *(s for s in MLA_SPECS.values())],
    ids=[*PLAIN, *(f"mla-{name}" for name in MLA_SPECS)],
)
@pytest.mark.parametrize("segments", [[(9, 3)], [(2, 40), (1, 2), (3, 5)]], ids=["one", "many"])
@pytest.mark.parametrize("source", ["q", "pages", "o", "lse"])
@parametrize_values
@parametrize_seed
def test_shared_prefixes(spec, segments, source, value, seed):
    case = SharedBatch(spec, segments, seed)
    array = getattr(case, source)
    if source == "pages":
        for s in range(0, len(segments), 2):
            page = array[case.page_ids[case.page_indptr[s]]].reshape(-1, array.shape[-1])
            page[case.rng.integers(len(page)), case.rng.integers(page.shape[1])] = value
    else:
        rows = case.rng.choice(len(array), max(1, len(array) // 4), replace=False)
        array[(rows, *(case.rng.integers(n) for n in array.shape[1:]))] = value
    case.nothing_seen |= np.isneginf(case.lse)
    with np.errstate(invalid="ignore"):
        case.check()


STATES = np.array([NAN, INF, -INF, 3.0, 0.0, -200.0], np.float32)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_merge(dtype):
    """Every pair of such states; what a state without weight holds does not matter."""
    lse, lse_other = (x.reshape(-1, 1) for x in np.meshgrid(STATES, STATES))
    rng = np.random.default_rng(0)
    o, o_other = (normal(rng, (lse.size, 1, 24), dtype) for _ in range(2))
    o[np.isneginf(lse)], o_other[np.isneginf(lse_other)] = NAN, NAN
    o[lse == 3.0, 5], o_other[lse_other == 0.0, 7] = NAN, NAN
    spec = KernelSpec(1, 1, 24, 24, dtype, dtype, target=SPECS["f32"].target)
    expected = reference.merge(o, lse, o_other, lse_other)
    # A weight below the smallest normal number is 0, and so NaN behind it does not count.
    for n in range(len(lse)):
        if np.isfinite([lse[n], lse_other[n]]).all() and abs(lse[n] - lse_other[n]) > 127:
            expected[0][n] = o[n] if lse[n] > lse_other[n] else o_other[n]
    actual = tensor(o), tensor(lse)
    compiled("merge", spec)(*actual, tensor(o_other), tensor(lse_other))
    reference.assert_lse_close(actual[1].numpy(), expected[1])
    reference.assert_close(actual[0].numpy(), expected[0], dtype, "o")


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_sinks(dtype):
    """A sink is seen by every row of its head."""
    rng = np.random.default_rng(0)
    heads = len(STATES)
    lse = np.repeat(STATES, heads).reshape(heads, heads).copy()
    o = normal(rng, (*lse.shape, 24), dtype)
    o[np.isneginf(lse)] = 0
    spec = KernelSpec(heads, heads, 24, 24, dtype, dtype, target=SPECS["f32"].target)
    expected = reference.apply_sinks(o, lse, STATES)
    actual = tensor(o), tensor(lse)
    compiled("apply_sinks", spec)(*actual, tensor(STATES))
    reference.assert_lse_close(actual[1].numpy(), expected[1])
    reference.assert_close(actual[0].numpy(), expected[0], dtype, "o")


def payloads(dtype: str) -> np.ndarray:
    """NaN of every kind: quiet, of either sign, and with all bits set."""
    bits, itemsize = {F32: (0x7FC00000, 4), F16: (0x7E00, 2), BF16: (0x7FC0, 2)}[dtype]
    sign = 1 << (8 * itemsize - 1)
    patterns = [bits, bits | sign, sign - 1, 2 * sign - 1]
    return np.array(patterns, f"uint{8 * itemsize}").view(dtype)


# x86-64-v4 rounds as a CPU with products of bfloat16 pairs does, and reads them as x86-64-v3 does.
OTHERS = other_cpu("x86-64-v4", pytest.mark.slow), other_cpu("x86-64-v3"), other_cpu("x86-64")


@latin_square(2, "cpu", "dtypes")
@pytest.mark.parametrize("cpu", ["native", *OTHERS])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, F16), (BF16, BF16)])
def test_every_nan_stays_nan(dtypes, cpu):
    """Rounding must not carry from the fraction of a NaN into its exponent."""
    target = vector_target(cpu)
    spec = make_spec((2, 1), 16, dtypes, 4, target=target)
    for source in SOURCES:
        for nan in payloads(dtypes[0] if source == "q" else dtypes[1]):
            for name, lengths in (("decode", [(1, 7), (1, 1)]), ("prefill", [(3, 7), (1, 1)])):
                case = PagedBatch(spec, lengths, 0)
                if source == "q":
                    case.q[0, 1, 3] = nan
                else:
                    kv_rows(case, 0, 6)[SOURCES.index(source) - 1][0, 3] = nan
                getattr(case, name)(cpu=cpu)
                case.verify()


@pytest.mark.parametrize("dtype", [F32, F16])
def test_append_rounds_nan_to_nan(dtype):
    spec = make_spec((2, 1), 16, (dtype, BF16), 4)
    nans = np.resize(payloads(dtype), (3, 1, 16))
    pages = tensor(np.zeros((1, 2, 1, 4, 16), BF16))
    compiled("transpose_append", spec)(
        pages, tensor(nans), tensor(nans), tensor(np.arange(3, dtype=np.int32))
    )
    assert np.isnan(pages.numpy()[..., :3, :].astype(np.float32)).all()


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_infinity_in_unused_slots(name):
    """The other tests have NaN there."""
    case = PagedBatch(PAIRS, DECODE if name == "decode" else PREFILL, 0)
    case.pages[np.isnan(case.pages)] = INF
    getattr(case, name)()
    case.verify()


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_small_weights_fade_to_zero(name):
    """Positions far below the largest score add nothing, and no position adds a wrong number."""
    scores = np.linspace(-160, 0, 2561, dtype=np.float32)  # all of them exact
    spec = make_spec((1, 1), 8, page=16)
    case = PagedBatch(spec, [(2 if name == "prefill" else 1, len(scores))], 0)
    case.sm_scale = float(np.log(2))
    case.q[...] = 0
    case.q[..., 0] = 1
    for position, score in enumerate(scores):
        k, v = kv_rows(case, 0, position)
        k[0], v[0] = 0, 0
        k[0, 0] = score
        v[0, 0] = 1 if score > -115 else 2.0**100
    getattr(case, name)()
    case.verify()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
