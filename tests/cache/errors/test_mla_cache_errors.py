# SPDX-License-Identifier: Apache-2.0
"""Wrong calls and configurations of MLA layers raise errors that name what was wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ...support.cases.caches.mla_cache_cases import (
    CKV,
    HEADS,
    KPE,
    QK_DIM,
    V_DIM,
    MLAPair,
    make_mla_cache,
)
from ...support.emulators.python_kernels import MLA_LAYER, snapshot
from ...support.worlds.permissive_steps import permissive_step

append = tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_append_mla_kv")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"num_kv_heads": 2}, "num_kv_heads of kind 'mla' must be 1"),
        ({"v_head_dim": 32}, "v_head_dim must be between 8 and 24"),
        ({"mla_original_qk_head_dim": 16}, "and need each other"),
        ({"kind": "mha", "mla_original_v_head_dim": 16}, "are for kind 'mla' only"),
        ({"mla_original_qk_head_dim": 12, "mla_original_v_head_dim": 8}, "multiple of 8"),
    ],
)
def test_configurations_that_no_cache_serves(fields, text):
    with pytest.raises(ValueError, match=text):
        layer = pkv.LayerSpec(**{"kind": "mla", **fields})
        pkv.KVCacheConfig(1, 4, 4, 24, 16, layers=[layer])


def test_calls_that_would_count_rows_twice_or_not_at_all():
    pair = MLAPair(make_mla_cache())
    pair.add(0)
    pair.step([0], [3], "prefill")
    q, rows = pair.normal(1, HEADS, CKV + KPE), pair.normal(1, HEADS, QK_DIM)
    with permissive_step(pair.cache, [0], [1]):
        with pytest.raises(ValueError, match="call append_mla_kv before it"):
            pair.cache.cross_attention(0, q)
        pair.cache.append_mla_kv(0, pair.normal(1, CKV + KPE))
        pair.cache.cross_attention(0, q)
        with pytest.raises(ValueError, match="has covered this step's rows already"):
            pair.cache.self_attention(0, rows, rows, rows[:, :, :V_DIM])
    with permissive_step(pair.cache, [0], [1]):
        pair.cache.self_attention(0, rows, rows, rows[:, :, :V_DIM])
        pair.cache.cross_attention(0, q)  # the past alone: nothing appended is needed


def _rows(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


INSIDE = {
    "attention": (ValueError, "is an MLA layer", lambda c: c.attention(0, _rows(3, 6, 24))),
    "append_rows": (
        ValueError,
        r"\[3, 24\], got \[4, 24\]",
        lambda c: c.append_mla_kv(0, _rows(4, 24)),
    ),
    "append_width": (ValueError, "kv must have shape", lambda c: c.append_mla_kv(0, _rows(3, 16))),
    "append_dtype": (
        ValueError,
        "kv must be float32",
        lambda c: c.append_mla_kv(0, _rows(3, 24, dtype="float16")),
    ),
    "append_layer": (IndexError, "layer 2", lambda c: c.append_mla_kv(2, _rows(3, 24))),
    "append_none": (TypeError, "kv must be a tensor", lambda c: append(c, 0, None)),
    "self_heads": (
        ValueError,
        "k must have shape",
        lambda c: c.self_attention(0, _rows(3, 4, 16), _rows(3, 1, 16), _rows(3, 1, 8)),
    ),
    "self_width": (
        ValueError,
        "q must have shape",
        lambda c: c.self_attention(0, _rows(3, 4, 24), _rows(3, 4, 24), _rows(3, 4, 8)),
    ),
    "cross_width": (
        ValueError, "q must have shape", lambda c: c.cross_attention(0, _rows(3, 4, 16)),
    ),
    "kernel": (
        ValueError,
        "without the kernel 'prefill_ragged'",
        lambda c: c.self_attention(0, _rows(3, 4, 16), _rows(3, 4, 16), _rows(3, 4, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(INSIDE))
def test_wrong_calls_within_a_step(name):
    cache = make_mla_cache({"prefill_ragged": None})
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    with permissive_step(cache, [0, 1], [2, 1]):
        error, text, call = INSIDE[name]
        before = snapshot(cache, [0, 1])
        with pytest.raises(error, match=text):
            call(cache)
        assert snapshot(cache, [0, 1]) == before


def test_wrong_calls_outside_a_step():
    cache = make_mla_cache()
    cache.add_sequence(0)
    with pytest.raises(ValueError, match="within a step only"):
        cache.append_mla_kv(0, _rows(1, 24))
    with pytest.raises(ValueError, match="not within the 0 of sequence 0"):
        cache.debug_get_kv_mla(0, 0, 1)
    with pytest.raises(ValueError, match="needs layers of kind mha"):
        cache.debug_get_kv(0)
    with pytest.raises(ValueError, match="1 positions from 0"):
        cache.debug_set_kv_mla(0, 0, _rows(2, 1, 24))
    with pytest.raises(ValueError, match="3 dimensions"):
        cache.debug_set_kv_mla(0, 0, _rows(1, 24))


def test_a_layer_without_the_dims_before_absorption():
    """It takes self attention of any width that its kernel takes, and a scale must be given."""
    layer = {k: v for k, v in MLA_LAYER.items() if not k.startswith("mla_original")}
    cache = make_mla_cache(layers=[layer])
    cache.add_sequence(0)
    with permissive_step(cache, [0], [2]):
        rows = _rows(2, 4, 40)
        with pytest.raises(ValueError, match="sm_scale must be given"):
            cache.self_attention(0, rows, rows, rows[:, :, :8])
        o, _ = cache.self_attention(0, rows, rows, rows[:, :, :8], 0.1)
        np.testing.assert_allclose(o.numpy(), rows[:, :, :8], rtol=1e-6)
        with pytest.raises(ValueError, match="q must have shape"):
            cache.self_attention(0, rows, rows[:, :, :16], rows[:, :, :8], 0.1)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
