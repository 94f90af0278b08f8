# SPDX-License-Identifier: Apache-2.0
"""The nn class with a codec: the model's cache quantizes, and other runtimes are refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS

from .. import reference
from ..support.harness.selections import with_slow
from . import test_frontend_mla
from .test_frontend import (
    CAPACITIES,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    SM_SCALE,
    export_model,
)

LATENT_ROPE = 32  # columns behind those that are V: int4 needs a multiple of 32


def made(**extra) -> tuple[relax.VirtualMachine, pkv.KVCache]:
    vm = relax.VirtualMachine(
        tvm.compile(export_model(pkv.PagedKVCache, **extra), target="llvm"), tvm.cpu()
    )
    return vm, vm["create"](*(Shape([n]) for n in CAPACITIES.values()))


@pytest.mark.parametrize("codec", with_slow(CODECS, "float8_e4m3fn", "int5"))
def test_a_model_with_a_codec(codec):
    rope = {"mode": RopeMode.NONE}
    vm, cache = made(rope=rope, kv_dtype=codec)
    described = cache.description
    assert [layer["kv_dtype"] for layer in described["layers"]] == [codec, codec]
    expected = reference.ReferenceCache(2, CODECS[codec])
    rng = np.random.default_rng(0)
    cache.add_sequence(0)
    expected.add_sequence(0)
    for num_rows in (7, 1, 1, 3):
        shape = (1, num_rows, NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        qkv = rng.standard_normal(shape, dtype="float32")
        with cache.forward([0], [num_rows]):
            outputs = vm["fused"](tvm.runtime.tensor(qkv), cache)
        for layer, out in zip((1, 0), outputs, strict=True):
            wanted, _ = expected.attention(layer, [0], [num_rows], qkv[0], NUM_KV_HEADS, SM_SCALE)
            # A row may be rounded to the neighbour of a code; int4's and int5's are far apart.
            tolerance = 0.05 if CODECS[codec].is_packed else 0.01
            np.testing.assert_allclose(out.numpy()[0], wanted, atol=tolerance)
    k = cache.debug_get_kv(0)[0].numpy()
    assert k.dtype == np.float32 and k.shape == (2, 12, NUM_KV_HEADS, HEAD_DIM)


def test_a_model_with_static_scales():
    """Rows of both layers are kept by scales of their own."""
    scales = [(0.01, tuple(np.linspace(0.005, 0.009, NUM_KV_HEADS))), (0.004, 0.02)]
    vm, cache = made(rope={"mode": RopeMode.NONE}, kv_dtype="float8_e4m3fn", kv_scales=scales)
    cache.add_sequence(0)
    shape = (1, 9, NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    qkv = np.random.default_rng(0).standard_normal(shape, dtype="float32")
    with cache.forward([0], [9]):
        vm["fused"](tvm.runtime.tensor(qkv), cache)
    rows = np.split(qkv[0], [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)[1:]
    for plane, (own, found) in enumerate(zip(rows, cache.debug_get_kv(0), strict=True)):
        for layer in range(2):
            static = np.broadcast_to(np.float32(scales[layer][plane]), NUM_KV_HEADS)
            want = reference.quantized.keep(CODECS["float8_e4m3fn"], own, static=static)
            np.testing.assert_array_equal(found.numpy()[layer], want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_scales": [(1, 1)]}, "1 entries for 2 layers"),
        ({"kv_scales": [(1, 1)] * 2, "kv_dtype": "int4"}, "kv_scales are for kv_dtype"),
        ({"kv_scales": [(1, 1)] * 2, "runtime": "stock"}, "kv_scales need runtime"),
    ],
)
def test_static_scales_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        export_model(pkv.PagedKVCache, **{"kv_dtype": "int8", **changes})


@pytest.mark.parametrize("codec", with_slow(CODECS, "int8", "int4", "int5"))
def test_a_model_with_latent_rows(monkeypatch, codec):
    """MLA layers: rows of both groups of a latent row, appended and attended to."""
    monkeypatch.setattr(test_frontend_mla, "KPE", LATENT_ROPE)
    monkeypatch.setattr(test_frontend_mla, "QK_DIM", test_frontend_mla.NOPE + LATENT_ROPE)
    monkeypatch.setattr(test_frontend_mla, "SM_SCALE", SM_SCALE)
    vm = test_frontend_mla._compile(kv_dtype=codec)
    capacities = test_frontend_mla.CAPACITIES.values()
    cache = vm["create"](*(Shape([n]) for n in capacities))
    assert [layer["kv_dtype"] for layer in cache.description["layers"]] == [codec, codec]
    expected = reference.ReferenceLatentCache(2, CODECS[codec])
    expected.v_width = latent = test_frontend_mla.CKV
    heads, v_dim = test_frontend_mla.HEADS, test_frontend_mla.V_DIM
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((heads, latent, v_dim), dtype="float32") / 4
    cache.add_sequence(0)
    expected.add_sequence(0)
    for num_rows in (18, 1, 1, 5, 1):
        rows = rng.standard_normal((num_rows, latent + LATENT_ROPE), dtype="float32")
        q = rng.standard_normal((num_rows, heads, latent + LATENT_ROPE), dtype="float32")
        inputs = [tvm.runtime.tensor(x[None]) for x in (rows[:, None], q)]
        with cache.forward([0], [num_rows]):
            outputs = vm["decode"](*inputs, cache, tvm.runtime.tensor(weight))
        for layer, out in enumerate(outputs):
            expected.append(layer, [0], [num_rows], rows)
            # A step of several rows attends to the past only, beside `self_attention`.
            o, _ = expected.absorbed(
                layer, [0], [num_rows], q, latent, SM_SCALE, with_step=num_rows == 1
            )
            wanted = np.einsum("nhc,hcv->nhv", o, weight)
            tolerance = 0.2 if CODECS[codec].is_packed else 0.04  # sums of 32 columns
            np.testing.assert_allclose(out.numpy()[0], wanted, atol=tolerance)
    assert cache.debug_get_kv_mla(0).numpy().shape == (2, 26, latent + LATENT_ROPE)


def test_pages_of_another_type_of_numbers():
    _, cache = made(kv_dtype="bfloat16")
    assert cache.description["kv_dtype"] == "bfloat16"
    cache.add_sequence(0)
    assert cache.debug_get_kv(0)[0].dtype == "bfloat16"


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_the_stock_runtime_is_refused(kv_dtype):
    with pytest.raises(ValueError, match=f"dtype of a step, float32, not as {kv_dtype}"):
        export_model(pkv.PagedKVCache, kv_dtype=kv_dtype, runtime="stock")


def test_what_has_no_codec_is_refused():
    with pytest.raises(ValueError, match="kv_dtype must be one of .*int4; got 'int3'"):
        export_model(pkv.PagedKVCache, kv_dtype="int3")
    with pytest.raises(ValueError, match='rope mode "inline"'):
        export_model(pkv.PagedKVCache, {"mode": RopeMode.INLINE}, kv_dtype="int4")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
