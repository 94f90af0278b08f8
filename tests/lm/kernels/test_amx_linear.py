# SPDX-License-Identifier: Apache-2.0
"""Linear layers in the tiles of AMX against NumPy, on a model of the tile registers."""

from __future__ import annotations

import functools
from dataclasses import replace

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tvm_pagedkv_lm.config.expert_config import Experts
from tvm_pagedkv_lm.formats.weight_formats import FORMATS, GROUP
from tvm_pagedkv_lm.kernels.linear.amx.tile_tasks import BLOCKS_PER_TASK, MIN_TILE_ROWS
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.expert_linear import expert_linear
from tvm_pagedkv_lm.kernels.linear.head_linear import head_linear
from tvm_pagedkv_lm.kernels.linear.linear import embedding, linear
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix
from tvm_pagedkv_lm.kernels.linear.packed_products import DEPTH, TASK_ROWS
from tvm_pagedkv_lm.kernels.linear.row_codes import ROW_BYTES, encode_rows
from tvm_pagedkv_lm.kernels.rows.routing_kernels import group_pairs

from ... import reference
from ...support.cases.kernels.kernel_specs import BF16, parametrize_seed
from ...support.cases.models.weight_cases import random_codes
from ...support.emulators import tile_model

pytestmark = pytest.mark.skipif(not tile_model.runs_here(), reason="no AVX-512 with bfloat16")
# As on Sapphire Rapids, where vectors of float32 numbers beat those of pairs.
AMX = replace(tile_model.AMX, slow_bf16_dot=True)
# None, rows of vectors, and of tiles: 16, some of 16, 32 and more, a task, and some tasks.
ROWS = (0, 1, 7, MIN_TILE_ROWS, 16, 17, 40, TASK_ROWS - 1, TASK_ROWS, 4 * TASK_ROWS + 9)
# Input features that end within a step or a part, and blocks that fill no task.
SHAPES = {
    "one": (1, 2),
    "tail": (65, 48),
    "parts": (200, 2 * DEPTH + 6),
    "whole": (128, DEPTH),
    "tasks": ((2 * BLOCKS_PER_TASK + 1) * 64, 32),
}


@pytest.fixture(autouse=True)
def amx():
    """Execute tile instructions on the model."""
    with tile_model.tile_model():
        yield


def _build(kernel):
    module = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    return tvm.tirx.build(module, target=tile_model.CPU)["kernel"]


@functools.cache
def _compiled(matrix: PackedMatrix, out_dtype: str, **added):
    return _build(linear(matrix, matrix.dtype, out_dtype, **dict(added)))


def _random(rng, shape, dtype: str = BF16) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _empty(shape, dtype: str):
    return tvm.runtime.tensor(np.full(shape, -7 if dtype == "int32" else np.nan, dtype))


def _assert_exact(found, x, weight, what: str) -> None:
    """Products are exact in float32, so only their sum is rounded."""
    expected = np.einsum("...i,...oi->...o", x, weight, dtype="float64")
    error = 2e-6 * np.sqrt(x.shape[-1])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=error, err_msg=what)


def _dots(matrix: PackedMatrix | CodeMatrix, count: int) -> int:
    """Products of tiles for a number of rows."""
    tasks = [min(TASK_ROWS, count - begin) for begin in range(0, count, TASK_ROWS)]
    strips = sum(-(-rows // 16) for rows in tasks if rows >= MIN_TILE_ROWS)
    return strips * matrix.num_blocks * 4 * -(-matrix.in_features // 32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@parametrize_seed
def test_linear(shape, seed):
    """With bias and residual, and plain with float32 output; rows are counted in tiles."""
    rng = np.random.default_rng(seed)
    matrix = PackedMatrix(*shape, BF16, AMX)
    weight = _random(rng, shape)
    packed = tvm.runtime.tensor(matrix.pack(weight))
    bias = _random(rng, shape[:1])
    full = _compiled(matrix, BF16, bias=True, residual=True)
    plain = _compiled(matrix, "float32")
    for n in ROWS:
        x, residual = _random(rng, (n, shape[1])), _random(rng, (n, shape[0]))
        inputs = [tvm.runtime.tensor(value) for value in (x, bias, residual)]
        out = _empty((n, shape[0]), BF16)
        full(inputs[0], packed, *inputs[1:], out)
        product = x.astype("float64") @ weight.astype("float64").T
        expected = product + bias.astype("float64") + residual.astype("float64")
        scale = np.sqrt(shape[1])
        reference.assert_close(out.numpy(), expected, BF16, f"{n} rows", scale=scale)
        before = tile_model.counts().dots
        out = _empty((n, shape[0]), "float32")
        plain(inputs[0], packed, out)
        _assert_exact(out.numpy(), x, weight, f"{n} rows")
        assert tile_model.counts().dots - before == _dots(matrix, n)


def test_every_task_configures_its_tiles_once():
    rng, shape = np.random.default_rng(1), SHAPES["tasks"]
    matrix = PackedMatrix(*shape, BF16, AMX)
    packed = tvm.runtime.tensor(matrix.pack(_random(rng, shape)))
    out = tvm.runtime.empty((2 * TASK_ROWS, shape[0]), "float32")
    x = tvm.runtime.tensor(_random(rng, (2 * TASK_ROWS, shape[1])))
    _compiled(matrix, "float32")(x, packed, out)
    done = tile_model.counts()
    # Rows of two tasks, and two of nine blocks for each task.
    assert done.begins == done.ends == 2 * 5
    assert done.threads <= 2  # the caller does the tasks of a worker that is late


def test_rows_that_are_not_finite_stay_alone():
    """NaN in a row, and what lies behind the last row and the last input feature."""
    rng, shape = np.random.default_rng(2), SHAPES["parts"]
    matrix = PackedMatrix(*shape, BF16, AMX)
    weight, x = _random(rng, shape), _random(rng, (21, shape[1]))
    x[3, 5] = np.nan
    out = _empty((21, shape[0]), "float32")
    arrays = [tvm.runtime.tensor(array) for array in (x, matrix.pack(weight))]
    _compiled(matrix, "float32")(*arrays, out)
    rest = np.arange(21) != 3
    assert np.isnan(out.numpy()[3]).all()
    _assert_exact(out.numpy()[rest], x[rest], weight, "the other rows")


def test_odd_numbers_of_input_features_have_no_tiles():
    matrix = PackedMatrix(70, 33, BF16, AMX)
    assert not matrix.has_tiles and matrix.numbers == 1
    rng = np.random.default_rng(3)
    weight, x = _random(rng, (70, 33)), _random(rng, (40, 33))
    out = _empty((40, 70), "float32")
    arrays = [tvm.runtime.tensor(array) for array in (x, matrix.pack(weight))]
    _compiled(matrix, "float32")(*arrays, out)
    _assert_exact(out.numpy(), x, weight, "odd")
    assert not tile_model.counts().dots


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_have_no_tiles(dtype):
    matrix = PackedMatrix(64, 64, dtype, AMX)
    assert not matrix.has_tiles and matrix.shape == (1, 64, 64)
    assert "pagedkv_tile" not in linear(matrix, dtype, dtype).script()


def test_embedding():
    """Rows are read from the layout of tiles, which has zeros behind the last input feature."""
    rng, shape = np.random.default_rng(4), SHAPES["tail"]
    matrix = PackedMatrix(*shape, BF16, AMX)
    weight, ids = _random(rng, shape), rng.integers(0, shape[0], 17).astype("int32")
    out = _empty((17, shape[1]), BF16)
    packed = tvm.runtime.tensor(matrix.pack(weight))
    _build(embedding(matrix))(tvm.runtime.tensor(ids), packed, out)
    np.testing.assert_array_equal(out.numpy(), weight[ids])


@pytest.mark.parametrize("gathers, name", [(True, None), (False, None), (True, "int8")])
@parametrize_seed
def test_experts(gathers, name, seed):
    """Experts with many pairs, with a few and with none."""
    rng, experts, shape = np.random.default_rng(seed), Experts(7, 2, 8), (83, 3 * GROUP)
    if name is None:
        matrix = PackedMatrix(*shape, BF16, AMX)
        weights = _random(rng, (7, *shape))
        packed = np.concatenate([matrix.pack(weight) for weight in weights])
    else:
        matrix = CodeMatrix(*shape, FORMATS[name], AMX)
        codes = [random_codes(rng, shape, FORMATS[name]) for _ in range(7)]
        packed = np.concatenate([matrix.pack(weight) for weight in codes])
        weights = np.stack([weight.values() for weight in codes])
    bias = _random(rng, (7, shape[0]))
    args = (matrix, 7, 2, BF16, "float32")
    kernel = _build(expert_linear(*args, gathers=gathers, bias=True))
    group = _build(group_pairs(experts, AMX))
    for n in (3, 130):
        ids = np.stack([np.zeros(n), 1 + rng.integers(0, 5, n) ** 2 // 5], 1).astype("int32")
        order = [_empty(each, "int32") for each in ((ids.size,), (ids.size, 3), (1,))]
        group(tvm.runtime.tensor(ids), *order)
        pairs = order[0].numpy()
        x = _random(rng, (n if gathers else ids.size, shape[1]))
        rows = [tvm.runtime.tensor(x)] if name is None else _encoded(x)
        out = _empty((ids.size, shape[0]), "float32")
        before = tile_model.counts().dots
        kernel(*rows, *map(tvm.runtime.tensor, (packed, bias)), *order, out)
        assert (tile_model.counts().dots > before) == (n >= MIN_TILE_ROWS)
        chosen = ids.ravel()[pairs]
        found = out.numpy() if gathers else out.numpy()[pairs]
        sources = x[pairs // 2] if gathers else x
        found = found - bias[chosen].astype("float32")
        if name is None:
            _assert_exact(found, sources, weights[chosen], f"{n} rows")
        else:
            expected = np.einsum("pi,poi->po", sources, weights[chosen], dtype="float64")
            reference.assert_close(found, expected, BF16, f"{n} rows", scale=np.sqrt(shape[1]))


@pytest.mark.parametrize("shares_rows", [True, False])
@parametrize_seed
def test_heads(shares_rows, seed):
    rng, shape, num_heads = np.random.default_rng(seed), (70, 40), 3
    matrix = PackedMatrix(*shape, BF16, AMX)
    weights = _random(rng, (num_heads, *shape))
    packed = np.concatenate([matrix.pack(weight) for weight in weights])
    kernel = _build(head_linear(matrix, num_heads, BF16, "float32", shares_rows=shares_rows))
    for n in (5, 37):
        x = _random(rng, (n, shape[1]) if shares_rows else (n * num_heads, shape[1]))
        out = _empty((n * num_heads, shape[0]), "float32")
        kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(packed), out)
        rows = x[:, None] if shares_rows else x.reshape(n, num_heads, -1)
        found = out.numpy().reshape(n, num_heads, -1)
        _assert_exact(found, rows, weights, f"{n} rows")
    assert tile_model.counts().dots


CODE_FORMATS = [
    name if name in ("int8", "int4_minima") else pytest.param(name, marks=pytest.mark.slow)
    for name in FORMATS
]


@pytest.mark.parametrize("name", CODE_FORMATS)
@parametrize_seed
def test_codes(name, seed):
    """Quantized weights become bfloat16, by which every product is off; few rows keep the codes."""
    rng, shape = np.random.default_rng(seed), (64 * BLOCKS_PER_TASK + 83, 18 * GROUP)
    matrix = CodeMatrix(*shape, FORMATS[name], AMX)
    weight = random_codes(rng, shape, FORMATS[name])
    packed = tvm.runtime.tensor(matrix.pack(weight))
    full = _build(linear(matrix, BF16, BF16, bias=True, residual=True))
    plain = _build(linear(matrix, BF16, "float32"))
    bias = _random(rng, shape[:1])
    for n in (1, 5, 40, TASK_ROWS + 21):
        x, residual = _random(rng, (n, shape[1])), _random(rng, (n, shape[0]))
        rows = _encoded(x)
        product = x.astype("float64") @ weight.values().astype("float64").T
        out = _empty((n, shape[0]), BF16)
        full(*rows, packed, *map(tvm.runtime.tensor, (bias, residual)), out)
        expected = product + bias.astype("float64") + residual.astype("float64")
        scale = np.sqrt(shape[1])
        reference.assert_close(out.numpy(), expected, BF16, f"{n} rows", scale=scale)
        before = tile_model.counts().dots
        out = _empty((n, shape[0]), "float32")
        plain(*rows, packed, out)
        assert tile_model.counts().dots - before == _dots(matrix, n)
        if n >= MIN_TILE_ROWS:  # exact products of rounded weights
            product = x.astype("float64") @ weight.values().astype(BF16).astype("float64").T
        np.testing.assert_allclose(out.numpy(), product, rtol=1e-5, atol=1.5e-4 * scale)


def test_codes_of_float16_activations_have_no_tiles():
    matrix = CodeMatrix(83, 3 * GROUP, FORMATS["int8"], AMX)
    assert "pagedkv_tile" not in linear(matrix, "float16", "float16").script()


def _encoded(x: np.ndarray) -> list:
    shape = len(x), x.shape[1] // GROUP
    outs = [tvm.runtime.empty((*shape, ROW_BYTES), "uint8")]
    outs += [tvm.runtime.empty(shape, dtype) for dtype in ("float32", "int32")]
    _encoder(x.shape[1])(tvm.runtime.tensor(x), *outs)
    return outs


@functools.cache
def _encoder(width: int):
    return _build(encode_rows(width, BF16))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
