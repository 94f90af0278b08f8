# SPDX-License-Identifier: Apache-2.0
"""Routing, products of experts and their weighted sum, against NumPy."""

from __future__ import annotations

import functools

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv_lm.config.expert_config import Experts
from tvm_pagedkv_lm.formats.weight_formats import FORMATS, GROUP
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.expert_linear import expert_linear, stacked_shape
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix
from tvm_pagedkv_lm.kernels.linear.packed_products import TASK_ROWS
from tvm_pagedkv_lm.kernels.linear.row_codes import ROW_BYTES, encode_rows
from tvm_pagedkv_lm.kernels.rows.routing_kernels import combine, group_pairs, route

from ... import reference
from ...support.cases.kernels.kernel_specs import needs_cpu
from ...support.cases.models.weight_cases import random_codes
from ...support.harness.selections import latin_square

ROUTINGS = {
    "softmax": Experts(13, 4, 8),
    "probabilities": Experts(13, 4, 8, normalizes=False, scale=1.5),
    "sigmoid": Experts(12, 3, 8, "sigmoid", scale=2.5, has_correction=True),
    "scores": Experts(12, 1, 8, "sigmoid", normalizes=False),
    "groups": Experts(12, 3, 8, "sigmoid", has_correction=True, num_groups=4, num_chosen_groups=2),
    "all": Experts(3, 3, 8),
}


def _build(kernel, cpu: str = "native"):
    module = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    return tvm.tirx.build(module, target=resolve_target(cpu))["kernel"]


def _random(rng, shape, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _empty(shape, dtype: str):
    fill = -7 if dtype == "int32" else np.nan
    return tvm.runtime.tensor(np.full(shape, fill, dtype))


def _expected_route(logits, correction, experts: Experts):
    """Ids by falling scores, and factors, in float64."""
    logits = logits.astype("float64")
    if experts.scores == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + correction
    if experts.num_groups > 1:
        groups = choice.reshape(len(choice), experts.num_groups, -1)
        sums = np.sort(groups, -1)[..., -2:].sum(-1)
        worse = np.argsort(-sums, -1)[:, experts.num_chosen_groups :]
        np.put_along_axis(groups, worse[..., None], -np.inf, 1)
    ids = np.argsort(-choice, -1, kind="stable")[:, : experts.num_chosen]
    factors = np.take_along_axis(scores, ids, -1)
    if experts.normalizes:
        factors /= factors.sum(-1, keepdims=True)
    return ids, factors * experts.scale


@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name):
    experts, rng = ROUTINGS[name], np.random.default_rng(1)
    kernel = _build(route(experts, vector_target()))
    correction = np.zeros(experts.num_experts, "float32")
    if experts.has_correction:
        correction = _random(rng, experts.num_experts)
    for n in (1, 2700):
        logits = 3 * _random(rng, (n, experts.num_experts))
        outs = [_empty((n, experts.num_chosen), dtype) for dtype in ("int32", "float32")]
        given = [tvm.runtime.tensor(logits)]
        given += [tvm.runtime.tensor(correction)] if experts.has_correction else []
        kernel(*given, *outs)
        ids, factors = _expected_route(logits, correction, experts)
        np.testing.assert_array_equal(outs[0].numpy(), ids)
        np.testing.assert_allclose(outs[1].numpy(), factors, rtol=2e-5)


def test_route_of_equal_scores_and_nan():
    """Equal scores: the lower index. NaN: experts that exist, and factors that are NaN."""
    experts = ROUTINGS["softmax"]
    logits = np.zeros((2, experts.num_experts), "float32")
    logits[1] = np.nan
    outs = [_empty((2, experts.num_chosen), dtype) for dtype in ("int32", "float32")]
    _build(route(experts, vector_target()))(tvm.runtime.tensor(logits), *outs)
    ids, factors = (out.numpy() for out in outs)
    assert ids[0].tolist() == [0, 1, 2, 3] and np.allclose(factors[0], 0.25)
    assert ((0 <= ids[1]) & (ids[1] < experts.num_experts)).all() and np.isnan(factors[1]).all()


def _order(experts: Experts, ids: np.ndarray) -> list:
    """Run `group_pairs`."""
    outs = [_empty(shape, "int32") for shape in ((ids.size,), (ids.size, 3), (1,))]
    _build(group_pairs(experts, vector_target()))(tvm.runtime.tensor(ids), *outs)
    return outs


def _random_ids(rng, n: int, experts: Experts) -> np.ndarray:
    """Experts of each row, of which one is chosen by all rows and the last one by none."""
    others = [1 + rng.permutation(experts.num_experts - 2) for _ in range(n)]
    ids = [rng.permutation([0, *row[: experts.num_chosen - 1]]) for row in others]
    return np.array(ids, "int32")


@pytest.mark.parametrize("n", [1, 5, 2 * TASK_ROWS + 3])
def test_pairs_are_grouped_by_expert(n):
    experts = ROUTINGS["softmax"]
    ids = _random_ids(np.random.default_rng(2), n, experts)
    pairs, tasks, num_tasks = (out.numpy() for out in _order(experts, ids))
    np.testing.assert_array_equal(pairs, np.argsort(ids.ravel(), kind="stable"))
    begin = 0
    for expert, first, count in tasks[: num_tasks[0]]:
        assert first == begin and 0 < count <= TASK_ROWS
        assert (ids.ravel()[pairs[first : first + count]] == expert).all()
        begin += count
    counts = np.bincount(ids.ravel())
    assert begin == ids.size and num_tasks[0] == sum(-(-count // TASK_ROWS) for count in counts)


TARGETS = {"native": "native", "avx2": "x86-64-v3"}
CASES = [
    pytest.param(dtype, format, cpu, marks=marks if is_short else [*marks, pytest.mark.slow])
    for dtype in ("float32", "float16", "bfloat16")
    for format in (None, *FORMATS)
    for cpu in TARGETS
    for marks in [[] if cpu == "native" else [needs_cpu(TARGETS[cpu])]]
    for is_short in [
        (dtype, format, cpu)
        in {
            ("float32", None, "avx2"),
            ("float16", None, "native"),
            ("bfloat16", None, "native"),
            ("bfloat16", "int4_minima", "native"),
            ("float16", "int8", "avx2"),
        }
    ]
]


@latin_square(2, "dtype", "format", "cpu", "gathers")
@pytest.mark.parametrize(("dtype", "format", "cpu"), CASES)
@pytest.mark.parametrize("gathers", [True, False])
def test_expert_linear(dtype, format, cpu, gathers):
    """Products of each pair with its expert, whose last block has every kind of tail."""
    rng, cpu = np.random.default_rng(3), TARGETS[cpu]
    experts, shape, target = ROUTINGS["softmax"], (64 + 16 + 3, 3 * GROUP), vector_target(cpu)
    weights = _random(rng, (experts.num_experts, *shape))
    if format is None:
        matrix = PackedMatrix(*shape, dtype, target)
        weights = weights.astype(dtype)
        packed = [matrix.pack(weight) for weight in weights]
    else:
        matrix = CodeMatrix(*shape, FORMATS[format], target)
        quantized = [random_codes(rng, shape, FORMATS[format]) for _ in weights]
        packed = [matrix.pack(weight) for weight in quantized]
        weights = np.stack([weight.values() for weight in quantized])
    packed = np.concatenate(packed)
    assert packed.shape == stacked_shape(matrix, experts.num_experts)
    args = (matrix, experts.num_experts, experts.num_chosen, dtype, "float32")
    kernel = _build(expert_linear(*args, gathers=gathers, bias=True), cpu)
    bias = _random(rng, (experts.num_experts, shape[0]), dtype)
    for n in (1, 7, TASK_ROWS + 3):
        ids = _random_ids(rng, n, experts)
        order = _order(experts, ids)
        pairs = order[0].numpy()
        x = _random(rng, (n if gathers else ids.size, shape[1]), dtype)
        rows = _rows(matrix, x)
        out = _empty((ids.size, shape[0]), "float32")
        kernel(*rows, *map(tvm.runtime.tensor, (packed, bias)), *order, out)
        sources = x[pairs // experts.num_chosen] if gathers else x  # in the order of experts
        chosen = ids.ravel()[pairs]
        expected = np.einsum("pi,poi->po", sources, weights[chosen], dtype="float64")
        expected += bias[chosen].astype("float64")
        found = out.numpy() if gathers else out.numpy()[pairs]
        scale = np.sqrt(shape[1])
        error = 1.5e-4 if format is not None and matrix.multiplies_codes else 4e-6
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=error * scale)


def _rows(matrix, x: np.ndarray) -> list:
    """Rows as the kernel takes them."""
    if isinstance(matrix, PackedMatrix) or not matrix.multiplies_codes:
        return [tvm.runtime.tensor(x)]
    groups = matrix.num_groups
    shapes = {"uint8": (len(x), groups, ROW_BYTES), "float32": (len(x), groups)}
    outs = [
        tvm.runtime.empty(shapes.get(dtype, (len(x), groups)), dtype)
        for dtype in ("uint8", "float32", "int32")
    ]
    _encoder(x.shape[1], str(x.dtype), matrix.multiplies_words)(tvm.runtime.tensor(x), *outs)
    return outs


@functools.cache
def _encoder(width: int, dtype: str, as_words: bool):
    return _build(encode_rows(width, dtype, as_words=as_words))


@pytest.mark.parametrize("n", [1, 200])
@pytest.mark.parametrize("added", ["nothing", "residual", "shared", "gate", "one"])
def test_combine(n, added):
    rng, num_chosen, features, dtype = np.random.default_rng(4), 3, 80, "bfloat16"
    num_chosen = 1 if added == "one" else num_chosen
    x, factors = _random(rng, (n * num_chosen, features)), _random(rng, (n, num_chosen))
    given, options = {}, {}
    expected = x.reshape(n, num_chosen, features).astype("float64")
    if added == "one":
        options["weighted"], expected = False, expected[:, 0]
    else:
        given["factors"] = factors
        expected = np.einsum("nkf,nk->nf", expected, factors, dtype="float64")
    if added in ("shared", "gate"):
        given["shared"], options["shared"] = _random(rng, (n, features), dtype), dtype
        share = np.ones((n, 1))
        if added == "gate":
            given["gate"], options["shared_gate"] = _random(rng, (n, 1)), True
            share = 1 / (1 + np.exp(-given["gate"].astype("float64")))
        expected = expected + share * given["shared"].astype("float64")
    if added in ("residual", "gate"):
        given["residual"], options["residual"] = _random(rng, (n, features), dtype), dtype
        expected = expected + given["residual"].astype("float64")
    kernel = _build(combine(features, num_chosen, dtype, vector_target(), **options))
    out = _empty((n, features), dtype)
    kernel(*map(tvm.runtime.tensor, (x, *given.values())), out)
    reference.assert_close(out.numpy(), expected, dtype, added)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
