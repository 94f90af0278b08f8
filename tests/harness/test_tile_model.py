# SPDX-License-Identifier: Apache-2.0
"""The model of the tile registers: the arithmetic of the hardware, and what it refuses."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from tir_kernels.cpu.isa.matrices import amx

from ..support.emulators import tile_model

pytestmark = pytest.mark.skipif(not tile_model.runs_here(), reason="no AVX-512 with bfloat16")
BF16 = ml_dtypes.bfloat16


@pytest.fixture
def tiles():
    """The model, configured as kernels do; a thread of the tests keeps nothing afterwards."""
    library = tile_model.model()
    library.tile_model_reset()
    library.tile_model_ldtilecfg(amx.CONFIG)
    yield library
    library.tile_model_tilerelease()
    library.tile_model_reset()


def _load(tiles, number: int, values: np.ndarray) -> None:
    at = values.ctypes.data_as(ctypes.c_void_p)
    tiles.tile_model_tileloadd64(number, at, ctypes.c_int64(values.strides[0]))


def _product(tiles, a: np.ndarray, b: np.ndarray, old: np.ndarray) -> np.ndarray:
    """``old + a b``, by one product of tiles."""
    pairs = np.ascontiguousarray(b.reshape(16, 2, 16).transpose(0, 2, 1)).reshape(16, 32)
    for number, values in ((0, old), (4, a), (6, pairs)):
        _load(tiles, number, values)
    tiles.tile_model_tdpbf16ps(0, 4, 6)
    out = np.zeros((16, 16), np.float32)
    at = out.ctypes.data_as(ctypes.c_void_p)
    tiles.tile_model_tilestored64(0, at, ctypes.c_int64(64))
    tile_model.counts()
    return out


def _flushed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def _expected(a: np.ndarray, b: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The sums in the order of the manual, each rounded once, denormal numbers as zeros."""
    a, b = (_flushed(x).astype(np.float64) for x in (a, b))
    sums = []
    for parity in range(2):
        total = np.zeros((16, 16), np.float32)
        for k in range(parity, 32, 2):
            total = _flushed(total.astype(np.float64) + np.outer(a[:, k], b[k]))
        sums.append(total)
    return _flushed(_flushed(old) + _flushed(sums[0] + sums[1]))


@pytest.mark.parametrize("scale", [1.0, 2.0**-62, 2.0**-64], ids=["usual", "small", "denormal"])
@pytest.mark.parametrize("seed", [0])
def test_products(tiles, scale, seed):
    rng = np.random.default_rng(seed)
    a, b = ((rng.standard_normal(s) * scale).astype(BF16) for s in ((16, 32), (32, 16)))
    old = (rng.standard_normal((16, 16)) * scale**2).astype(np.float32)
    out = _product(tiles, a, b, old)
    assert out.tobytes() == _expected(a, b, old).tobytes()


def test_denormal_numbers_are_zeros(tiles):
    a = np.full((16, 32), 2.0**-130).astype(BF16)
    b = np.full((32, 16), 2.0**100).astype(BF16)
    assert not _product(tiles, a, b, np.full((16, 16), 2.0**-130, np.float32)).any()


def test_not_a_number_stays_in_its_row_and_column(tiles):
    a, b = np.ones((16, 32), BF16), np.ones((32, 16), BF16)
    a[3, 5], b[7, 2] = np.nan, np.inf
    out = _product(tiles, a, b, np.zeros((16, 16), np.float32))
    assert np.isnan(out[3]).all()
    assert np.isinf(np.delete(out[:, 2], 3)).all()
    assert (np.delete(np.delete(out, 3, 0), 2, 1) == 32).all()


@pytest.mark.parametrize(
    "misuse, error",
    [
        (lambda t: t.tile_model_tilezero(8), "tilezero of tile 8"),
        (lambda t: t.tile_model_tdpbf16ps(0, 4, 4), "not distinct"),
        (lambda t: t.tile_model_ldtilecfg(bytes(64)), "palette 1"),
        (lambda t: t.tile_model_ldtilecfg(amx.CONFIG[:48] + bytes([17]) + bytes(15)), "tile 0"),
        (lambda t: t.tile_model_ldtilecfg(amx.CONFIG[:63] + b"\1"), "byte 63 is set"),
        (lambda t: _with_rows(t, 4, 8), "shapes do not match"),
    ],
    ids=["number", "same", "palette", "rows", "reserved", "shapes"],
)
def test_misuse_is_noticed(tiles, misuse, error):
    tile_model.counts()
    misuse(tiles)
    with pytest.raises(AssertionError, match=error):
        tile_model.counts()
    tiles.tile_model_ldtilecfg(amx.CONFIG)  # for the release that follows


def _with_rows(tiles, tile: int, rows: int) -> None:
    at = 48 + tile
    tiles.tile_model_ldtilecfg(amx.CONFIG[:at] + bytes([rows]) + amx.CONFIG[at + 1 :])
    tiles.tile_model_tdpbf16ps(0, 4, 6)


def test_tiles_are_there_between_configuration_and_release():
    library = tile_model.model()
    for _ in range(2):
        library.tile_model_reset()
        library.tile_model_tilezero(0)
        with pytest.raises(AssertionError, match="without a configuration"):
            tile_model.counts()
        library.tile_model_ldtilecfg(amx.CONFIG)
        library.tile_model_tilerelease()
    library.tile_model_reset()
