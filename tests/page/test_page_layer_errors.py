# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of appends to pages that the caller owns; they change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv import page

from .. import reference
from ..support.cases.kernels.attention_cases import normal


def good_append() -> dict:
    rng = np.random.default_rng(0)
    return {
        "append_key": normal(rng, (3, 2, 64), "float32"),
        "append_value": normal(rng, (3, 2, 64), "float32"),
        "batch_indices": np.array([0, 0, 1], np.int32),
        "positions": np.array([3, 4, 0], np.int32),
        "paged_kv_cache": np.full((5, 2, 4, 2, 64), np.nan, "float32"),
        "kv_indices": np.array([4, 1, 0], np.int32),
        "kv_indptr": np.array([0, 2, 3], np.int32),
        "kv_last_page_len": np.array([1, 1], np.int32),
    }


def _ints(*values, dtype=np.int32):
    return np.array(values, dtype)


def _read_only():
    pool = np.zeros((5, 2, 4, 2, 64), np.float32)
    pool.flags.writeable = False
    return pool


_POOL = np.zeros((5, 4, 2, 64), np.float32)
BAD_APPENDS = {
    "no tensor": ("append_key", [1.0], TypeError, "append_key must be a tensor, got list"),
    "k rank": ("append_key", np.zeros((3, 64), "f4"), ValueError, r"append_key must have shape"),
    "k scalar": ("append_key", np.zeros((), "f4"), ValueError, r"append_key must have shape"),
    "v rows": ("append_value", np.zeros((2, 2, 64), "f4"), ValueError, r"\[3, 2, 64\], got \[2"),
    "v dtype": ("append_value", np.zeros((3, 2, 64), "f2"), ValueError, "float32 as append_key"),
    "k type": ("append_key", np.zeros((3, 2, 64), "f8"), ValueError, "must be float32, .*float64"),
    "k columns": ("append_key", np.zeros((3, 2, 128), "f4")[..., ::2], ValueError, "contiguous"),
    "pool columns": (
        "paged_kv_cache",
        np.zeros((5, 2, 4, 2, 128), "f4")[..., ::2],
        ValueError,
        "paged_kv_cache must have contiguous rows",
    ),
    "pool rank": ("paged_kv_cache", _POOL, ValueError, r"\[pages, 2, page_size, heads, dim\]"),
    "pool planes": (
        "paged_kv_cache",
        np.zeros((5, 3, 4, 2, 64), "f4"),
        ValueError,
        r"\[pages, 2, page_size, heads, dim\], got \[5, 3",
    ),
    "pool triple": ("paged_kv_cache", (_POOL,) * 3, ValueError, "or a pair, got 3"),
    "pool shapes": ("paged_kv_cache", (_POOL, _POOL[:4]), ValueError, r"cache\[1\] must have"),
    "pool types": (
        "paged_kv_cache",
        (_POOL, _POOL.astype("f2")),
        ValueError,
        "must be float32 as paged_kv_cache",
    ),
    "pool repeats": (
        "paged_kv_cache",
        np.lib.stride_tricks.as_strided(_POOL, (5, 2, 4, 2, 64), (0, 0, 512, 256, 4)),
        ValueError,
        "twice",
    ),
    "pool read-only": ("paged_kv_cache", _read_only(), ValueError, "must be writable"),
    "pool empty page": (
        "paged_kv_cache",
        np.zeros((5, 2, 0, 2, 64), "f4"),
        ValueError,
        "axes of 1 to",
    ),
    "no pages": ("paged_kv_cache", np.zeros((0, 2, 4, 2, 64), "f4"), IndexError, "there are 0"),
    "layout": ("kv_layout", "NDH", ValueError, "kv_layout must be one of NHD, HND, got 'NDH'"),
    "mla layout": ("kv_layout", "XX", ValueError, "kv_layout must be one of"),
    "batch length": ("batch_indices", _ints(0, 0), ValueError, r"shape \[3\], got \[2\]"),
    "batch rank": ("batch_indices", np.zeros((3, 1), "i4"), ValueError, r"shape \[3\]"),
    "batch type": ("batch_indices", np.zeros(3, "f4"), ValueError, "int32 or int64, got float32"),
    "batch high": ("batch_indices", _ints(0, 0, 2), IndexError, r"\[2\] must be in \[-1, 2\), got"),
    "batch low": ("batch_indices", _ints(-2, 0, 1), IndexError, r"batch_indices\[0\] must be"),
    "batch wide": ("batch_indices", _ints(0, 0, 2**32, dtype=np.int64), ValueError, "fit in int32"),
    "position high": ("positions", _ints(3, 8, 0), IndexError, r"positions\[1\] must be in the pa"),
    "position low": ("positions", _ints(3, 4, -1), IndexError, r"positions\[2\].*got -1"),
    "position huge": ("positions", _ints(3, 2**31 - 1, 0), IndexError, r"positions\[1\]"),
    "page high": ("kv_indices", _ints(4, 1, 5), IndexError, r"kv_indices\[2\].*there are 5.*got 5"),
    "page low": ("kv_indices", _ints(-1, 1, 0), IndexError, r"kv_indices\[0\].*got -1"),
    "indices short": ("kv_indices", _ints(4, 1), ValueError, r"kv_indptr\[2\] must be at most 2"),
    "indptr falls": ("kv_indptr", _ints(0, 3, 2), ValueError, "must ascend .* got 2 at index 2"),
    "indptr negative": ("kv_indptr", _ints(-1, 2, 3), ValueError, "must ascend .* got -1"),
    "indptr length": ("kv_indptr", _ints(0, 3), ValueError, r"kv_last_page_len .* \[1\], got \[2"),
    "indptr empty": ("kv_indptr", _ints(), ValueError, "kv_"),
    "last long": ("kv_last_page_len", _ints(1, 5), ValueError, r"\[1\] must be in \[0, 4\], got 5"),
    "last negative": ("kv_last_page_len", _ints(-1, 1), ValueError, r"\[0\] must be in \[0, 4\]"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_bad_appends_change_nothing(name):
    argument, value, error, text = BAD_APPENDS[name]
    arguments = good_append()
    pool = arguments["paged_kv_cache"]
    before = pool.copy()
    if argument == "paged_kv_cache":
        pool = value
    with pytest.raises(error, match=text):
        page.append_paged_kv_cache(**(arguments | {argument: value}))
    if argument != "paged_kv_cache":
        reference.assert_same_bits(pool, before)
        page.append_paged_kv_cache(**arguments)
        assert not np.isnan(pool[4, :, 3]).any()


def test_bad_decode_appends_change_nothing():
    arguments = good_append()
    del arguments["batch_indices"], arguments["positions"]
    pool = arguments["paged_kv_cache"]
    before = pool.copy()
    for changes, error, text in (
        ({}, ValueError, "a row for each of 2 sequences, got 3"),
        ({"kv_indptr": _ints(0, 1, 1, 3)}, ValueError, "kv_last_page_len must have shape"),
        (
            {"kv_indptr": _ints(0, 1, 1, 3), "kv_last_page_len": _ints(1, 1, 1)},
            ValueError,
            "sequence 1 has no page",
        ),
        (
            {"kv_indptr": _ints(0, 1, 2, 3), "kv_last_page_len": _ints(1, 0, 1)},
            ValueError,
            r"kv_last_page_len\[1\] must be in \[1, 4\], got 0",
        ),
        (
            {
                "kv_indptr": _ints(0, 1, 2, 3),
                "kv_last_page_len": _ints(1, 1, 1),
                "kv_indices": _ints(0, 1, 9),
            },
            IndexError,
            r"kv_indices\[2\]",
        ),
    ):
        with pytest.raises(error, match=text):
            page.append_paged_kv_cache_decode(**(arguments | changes))
        reference.assert_same_bits(pool, before)


def test_bad_mla_appends():
    good = {
        "append_ckv": np.zeros((1, 8), "f4"),
        "append_kpe": np.zeros((1, 4), "f4"),
        "batch_indices": _ints(0),
        "positions": _ints(0),
        "ckv_cache": np.zeros((2, 4, 8), "f4"),
        "kpe_cache": np.zeros((2, 4, 4), "f4"),
        "kv_indices": _ints(1),
        "kv_indptr": _ints(0, 1),
        "kv_last_page_len": _ints(1),
    }
    page.append_paged_mla_kv_cache(**good)
    for name, value, text in (
        ("kpe_cache", np.zeros((3, 4, 4), "f4"), "kpe_cache must have shape"),
        ("kpe_cache", np.zeros((2, 4, 4), "f2"), "kpe_cache must be float32 as ckv_cache"),
        ("ckv_cache", np.zeros((2, 8), "f4"), r"shape \[pages, page_size, dim\]"),
        ("append_kpe", np.zeros((1, 8), "f4"), r"append_kpe must have shape \[1, 4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            page.append_paged_mla_kv_cache(**(good | {name: value}))
    with pytest.raises(TypeError, match="ckv_cache must be a tensor, got NoneType"):
        page.append_paged_mla_kv_cache(**(good | {"ckv_cache": None}))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
