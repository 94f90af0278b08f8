# SPDX-License-Identifier: Apache-2.0
"""MLA layers of the cache object: the ways through a step, forks, mixed models, wrong calls."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels import kernel_names

from . import reference
from .attention_cases import compiled
from .mla_cases import make_spec
from .python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    poison,
    shuffle,
    snapshot,
)

NUM_LAYERS, HEADS, CKV, KPE, NOPE, V_DIM = 2, 4, 16, 8, 8, 8
QK_DIM = NOPE + KPE  # before absorption
SM_SCALE = QK_DIM**-0.5
CACHE = "vm.builtin.attention_kv_cache_"


def make_mla_cache(kernels: dict | None = None, **fields) -> pkv.KVCache:
    fields.setdefault("layers", [MLA_LAYER] * NUM_LAYERS)
    return make_cache([{**MLA_KERNELS, **(kernels or {})}], **fields)


def compiled_kernels(dtype: str, page_size: int = 4) -> dict:
    spec = make_spec(HEADS, (CKV, KPE), (dtype, dtype), page_size, original=(QK_DIM, V_DIM))
    return {name: compiled(name, spec) for name in kernel_names(spec)}


class Model:
    """A cache and its reference, driven alike by a model with weights of its own."""

    def __init__(self, cache: pkv.KVCache, dtype: str = "float32", seed: int = 0):
        self.cache, self.dtype = cache, dtype
        self.expected = reference.ReferenceLatentCache(NUM_LAYERS, np.dtype(dtype))
        self.rng = np.random.default_rng(seed)
        self.w_k = self.rng.standard_normal((HEADS, NOPE, CKV)) / 4
        self.w_v = self.rng.standard_normal((HEADS, V_DIM, CKV)) / 4

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.cache.add_sequence(seq_id)
            self.expected.add_sequence(seq_id)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        self.expected.pop_n(seq_id, n)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def cross(self, layer: int, q: np.ndarray):
        """Absorbed cross attention, its output back in the space before absorption."""
        q = reference.mla_absorb(q, self.w_k).astype(self.dtype)
        o, lse = self.cache.cross_attention(layer, q)
        o = np.einsum("thc,hdc->thd", np.asarray(o.numpy(), np.float64), self.w_v)
        return tvm.runtime.tensor(o.astype(self.dtype)), lse

    def self_attention(self, layer: int, q: np.ndarray, latent: np.ndarray):
        k, v = reference.mla_expand(latent, self.w_k, self.w_v)
        return self.cache.self_attention(layer, q, k.astype(self.dtype), v.astype(self.dtype))

    def step(self, seq_ids: list[int], lengths: list[int], way: str) -> None:
        """`way`: "decode" (cross alone), "prefill" (self alone) or "extend" (both)."""
        with self.cache.forward(seq_ids, lengths):
            for layer in range(NUM_LAYERS):
                latent = self.normal(sum(lengths), CKV + KPE)
                q = self.normal(sum(lengths), HEADS, QK_DIM)
                assert self.cache.append_mla_kv(layer, latent).same_as(self.cache)
                if way == "decode":
                    result = self.cross(layer, q)
                else:
                    result = self.self_attention(layer, q, latent)
                if way == "extend":
                    result = self.cache.merge_attention(*result, *self.cross(layer, q))
                self.expected.append(layer, seq_ids, lengths, latent)
                o, lse = self.expected.non_absorbed(
                    layer, seq_ids, lengths, q, self.w_k, self.w_v, SM_SCALE
                )
                what = f"{way} {seq_ids} {lengths} layer {layer}"
                reference.assert_close(result[0].numpy(), o, self.dtype, what)
                reference.assert_close(result[1].numpy(), lse, self.dtype, what)
        self.cache.check_integrity()

    def check_rows(self) -> None:
        for seq_id in self.expected.sequences:
            rows = self.cache.debug_get_kv_mla(seq_id).numpy()
            for layer in range(NUM_LAYERS):
                if self.expected.sequences[seq_id][layer] is not None:
                    np.testing.assert_array_equal(rows[layer], self.expected.latent(seq_id, layer))


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
@pytest.mark.parametrize("kernels", ["numpy", "float32", "bfloat16"])
def test_every_way_through_a_step(kernels, aux_manager):
    dtype = "float32" if kernels == "numpy" else kernels
    own = {} if kernels == "numpy" else compiled_kernels(dtype)
    model = Model(make_mla_cache(own, dtype=dtype, aux_manager=aux_manager), dtype)
    shuffle(model.cache, 3)
    model.add(0, 1, 2)
    model.step([0, 1], [5, 9], "prefill")
    poison(model.cache)
    model.step([0, 1], [1, 1], "decode")
    model.step([1, 2, 0], [1, 7, 3], "extend")
    model.step([2, 0, 1], [1, 1, 1], "decode")
    model.step([1, 2], [1, 1], "extend")  # one row each, in parts all the same
    poison(model.cache)
    model.step([0], [1], "decode")
    model.check_rows()


@pytest.mark.parametrize("kernels", ["numpy", "float32"])
def test_forks_pops_and_copies(kernels):
    own = {} if kernels == "numpy" else compiled_kernels("float32")
    model = Model(make_mla_cache(own))
    model.add(0)
    model.step([0], [10], "prefill")
    model.fork(0, 1)
    model.fork(1, 2, 6)
    model.fork(2, 3, 0)
    assert model.cache.stats()["num_shared_pages"] == 3
    poison(model.cache)
    model.step([2], [1], "decode")
    model.step([0, 1], [1, 3], "extend")
    assert model.cache.stats()["cow_page_copies"] == 2
    model.step([3], [2], "prefill")
    model.pop(0, 5)
    model.pop(2, 7)
    poison(model.cache)
    model.step([0, 1, 3], [1, 1, 1], "decode")
    model.step([2], [4], "extend")
    model.check_rows()
    for seq_id in (0, 2, 1, 3):
        model.cache.remove_sequence(seq_id)
        model.cache.check_integrity()
    assert model.cache.num_available_pages() == 16


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_page_sizes(page_size):
    model = Model(make_mla_cache(compiled_kernels("float32", page_size), page_size=page_size))
    model.add(0, 1)
    model.step([0, 1], [3, 17], "prefill")
    model.fork(1, 2, 5)
    model.step([2, 0], [4, 1], "extend")
    model.step([0, 1, 2], [1, 1, 1], "decode")
    model.check_rows()


def test_rows_that_are_set_from_outside():
    model = Model(make_mla_cache())
    model.add(0)
    model.step([0], [6], "prefill")
    model.fork(0, 1)
    rows = model.normal(NUM_LAYERS, 3, CKV + KPE)
    model.cache.debug_set_kv_mla(1, 2, rows)
    np.testing.assert_array_equal(model.cache.debug_get_kv_mla(1, 2, 5).numpy(), rows)
    for layer in range(NUM_LAYERS):
        before = model.expected.latent(0, layer)
        np.testing.assert_array_equal(model.cache.debug_get_kv_mla(0).numpy()[layer], before)
    model.cache.check_integrity()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_from_a_configuration(dtype):
    config = pkv.KVCacheConfig(
        num_layers=NUM_LAYERS,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,  # as configurations of models have it
        qk_head_dim=CKV + KPE,
        v_head_dim=CKV,
        dtype=dtype,
        page_size=4,
        max_total_tokens=64,
        layers=[
            pkv.LayerSpec("mla", mla_original_qk_head_dim=QK_DIM, mla_original_v_head_dim=V_DIM)
        ]
        * NUM_LAYERS,
    )
    model = Model(pkv.create(config), dtype)
    assert model.cache.stats()["allocated_bytes"] == config.memory_bytes()
    model.add(0, 1)
    model.step([0, 1], [5, 9], "prefill")
    model.step([1, 0], [2, 1], "extend")
    model.step([1, 0], [1, 1], "decode")
    model.check_rows()


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"num_kv_heads": 2}, "num_kv_heads of kind 'mla' must be 1"),
        ({"v_head_dim": 32}, "v_head_dim must be between 8 and 24"),
        ({"mla_original_qk_head_dim": 16}, "go together"),
        ({"kind": "mha", "mla_original_v_head_dim": 16}, "belong to kind 'mla'"),
        ({"mla_original_qk_head_dim": 12, "mla_original_v_head_dim": 8}, "multiple of 8"),
    ],
)
def test_configurations_that_no_cache_serves(fields, text):
    with pytest.raises(ValueError, match=text):
        layer = pkv.LayerSpec(**{"kind": "mla", **fields})
        pkv.KVCacheConfig(1, 4, 4, 24, 16, layers=[layer])


# --- what cross attention covers ----------------------------------------------------------------


def cross_lse(model: Model, layer: int, q: np.ndarray) -> np.ndarray:
    return model.cache.cross_attention(layer, q)[1].numpy()


def test_cross_attention_covers_the_step_where_self_attention_was_not_called():
    """By layer and by step."""
    model = Model(make_mla_cache())
    model.add(0, 1)
    model.step([0], [5], "prefill")  # sequence 1 is empty
    rows = model.normal(2, HEADS, QK_DIM)
    for self_layers in ([], [0], [1], [0, 1], []):
        with model.cache.forward([0, 1], [1, 1]):
            for layer in range(NUM_LAYERS):
                latent, q = model.normal(2, CKV + KPE), model.normal(2, HEADS, CKV + KPE)
                model.cache.append_mla_kv(layer, latent)
                model.expected.append(layer, [0, 1], [1, 1], latent)
                if layer in self_layers:
                    model.cache.self_attention(layer, rows, rows, rows[:, :, :V_DIM])
                want = model.expected.absorbed(
                    layer, [0, 1], [1, 1], q, CKV, SM_SCALE, layer not in self_layers
                )
                for _ in range(2):
                    actual = model.cache.cross_attention(layer, q)
                    for got, expected in zip(actual, want, strict=True):
                        reference.assert_close(got.numpy(), expected, "float32")


def test_cross_attention_covers_the_past_where_a_sequence_appends_more_rows():
    model = Model(make_mla_cache())
    model.add(0, 1)
    model.step([0], [5], "prefill")
    with model.cache.forward([0, 1], [2, 1]):
        q = model.normal(3, HEADS, CKV + KPE)
        before = cross_lse(model, 0, q)
        latent = model.normal(3, CKV + KPE)
        model.cache.append_mla_kv(0, latent)
        np.testing.assert_array_equal(cross_lse(model, 0, q), before)
        assert np.isneginf(before[2]).all()
        model.expected.append(0, [0, 1], [2, 1], latent)
        want = model.expected.absorbed(0, [0, 1], [2, 1], q, CKV, SM_SCALE, with_step=False)
        reference.assert_close(before, want[1], "float32")


def test_calls_that_would_count_rows_twice_or_not_at_all():
    model = Model(make_mla_cache())
    model.add(0)
    model.step([0], [3], "prefill")
    q, rows = model.normal(1, HEADS, CKV + KPE), model.normal(1, HEADS, QK_DIM)
    with model.cache.forward([0], [1]):
        with pytest.raises(ValueError, match="call append_mla_kv before it"):
            model.cache.cross_attention(0, q)
        model.cache.append_mla_kv(0, model.normal(1, CKV + KPE))
        model.cache.cross_attention(0, q)
        with pytest.raises(ValueError, match="has covered this step's rows already"):
            model.cache.self_attention(0, rows, rows, rows[:, :, :V_DIM])
    with model.cache.forward([0], [1]):
        model.cache.self_attention(0, rows, rows, rows[:, :, :V_DIM])
        model.cache.cross_attention(0, q)  # the past alone: nothing appended is needed


# --- mixed models -------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["numpy", "compiled"])
def test_mha_and_mla_layers_in_one_cache(own):
    kernels = {} if own == "numpy" else compiled_kernels("float32")
    sets = [KERNELS, {**MLA_KERNELS, **kernels}]
    mla = {**MLA_LAYER, "kernel_set": 1}
    cache = make_cache(sets, layers=[mla, LAYER, mla, LAYER])
    stats = cache.stats()
    assert [group["num_layers"] for group in stats["groups"]] == [2, 2]
    expected = reference.ReferenceCache(2, np.dtype("float32"))
    model = Model(cache)
    cache.add_sequence(0)
    expected.add_sequence(0)
    model.expected.add_sequence(0)
    for seq_ids, lengths in (([0], [6]), ([0, 1], [1, 2]), ([1, 0], [1, 1])):
        with cache.forward(seq_ids, lengths):
            for i in range(2):
                qkv = model.normal(sum(lengths), 8, 8)
                out = cache.attention(2 * i + 1, qkv).numpy()
                o, _ = expected.attention(i, seq_ids, lengths, qkv, 2, 8**-0.5)
                reference.assert_close(out, o, "float32")
                latent = model.normal(sum(lengths), CKV + KPE)
                q = model.normal(sum(lengths), HEADS, QK_DIM)
                cache.append_mla_kv(2 * i, latent)
                model.expected.append(i, seq_ids, lengths, latent)
                result = model.self_attention(2 * i, q, latent)
                result = cache.merge_attention(*result, *model.cross(2 * i, q))
                o, lse = model.expected.non_absorbed(
                    i, seq_ids, lengths, q, model.w_k, model.w_v, SM_SCALE
                )
                reference.assert_close(result[0].numpy(), o, "float32")
                reference.assert_close(result[1].numpy(), lse, "float32")
        cache.check_integrity()
        shuffle(cache, 1)
        poison(cache)
        if not cache.stats()["num_shared_pages"]:
            for each in (cache, expected, model.expected):
                if 1 not in expected.sequences or each is not expected:
                    each.fork_sequence(0, 1)
    k, v = (x.numpy() for x in cache.debug_get_kv(1))
    latent = cache.debug_get_kv_mla(1).numpy()
    for i in range(2):
        for got, want in zip((k[i], v[i]), expected.kv(1, i), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(latent[i], model.expected.latent(1, i))


# --- wrong calls --------------------------------------------------------------------------------


def _raw(name: str, *args):
    return tvm_ffi.get_global_func(CACHE + name)(*args)


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
    "append_none": (TypeError, "kv must be a tensor", lambda c: _raw("append_mla_kv", c, 0, None)),
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
    with cache.forward([0, 1], [2, 1]):
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
    with cache.forward([0], [2]):
        rows = _rows(2, 4, 40)
        with pytest.raises(ValueError, match="sm_scale must be given"):
            cache.self_attention(0, rows, rows, rows[:, :, :8])
        o, _ = cache.self_attention(0, rows, rows, rows[:, :, :8], 0.1)
        np.testing.assert_allclose(o.numpy(), rows[:, :, :8], rtol=1e-6)
        with pytest.raises(ValueError, match="q must have shape"):
            cache.self_attention(0, rows, rows[:, :, :16], rows[:, :, :8], 0.1)
