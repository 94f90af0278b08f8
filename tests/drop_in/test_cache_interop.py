# SPDX-License-Identifier: Apache-2.0
"""Both kinds of cache in one process, and tensors of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ..support.emulators.python_kernels import make_cache
from ..support.emulators.stock import create_positional, stock_kernels
from ..support.worlds.permissive_steps import permissive_step

STATE, CACHE = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_"


def _call(name: str, *args):
    return tvm_ffi.get_global_func(name)(*args)


@pytest.fixture(scope="module")
def config():
    return pkv.KVCacheConfig(
        num_layers=2, num_qo_heads=4, num_kv_heads=2, qk_head_dim=16, dtype="float32",
        max_num_sequences=4, max_total_tokens=256, prefill_chunk_size=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return stock_kernels(4, 2, 16, "float32", num_layers=2)


def test_stock_objects_are_forwarded(config, kernels):
    pkv.use_stock_runtime()
    try:
        stock = create_positional(config, kernels, "tirx")
    finally:
        pkv.use_pagedkv_runtime()
    ours = create_positional(config, kernels, "tirx")
    assert isinstance(ours, pkv.KVCache) and not isinstance(stock, pkv.KVCache)
    rng = np.random.default_rng(0)
    for cache in (stock, ours):
        assert _call(CACHE + "empty", cache)
        _call(STATE + "add_sequence", cache, 0)
        _call(STATE + "add_sequence", cache, 1)
        assert not _call(CACHE + "empty", cache)
    for seq_ids, lengths in (([0, 1], [5, 20]), ([1, 0], [1, 1]), ([0], [30])):
        qkv = tvm.runtime.tensor(rng.standard_normal((sum(lengths), 8, 16)).astype("float32"))
        outputs = []
        for cache in (stock, ours):
            _call(STATE + "begin_forward", cache, Shape(seq_ids), Shape(lengths))
            for layer in range(2):
                outputs.append(tvm.runtime.empty((sum(lengths), 4, 16), "float32"))
                _call(CACHE + "attention_with_fused_qkv", cache, layer, 0.25, qkv, outputs[-1])
            positions = _call(CACHE + "get_query_positions", cache)
            outputs.append(positions.numpy().copy())
            _call(STATE + "end_forward", cache)
            outputs.append(_call(CACHE + "get_total_sequence_length", cache))
        for of_stock, of_ours in zip(outputs[:4], outputs[4:], strict=True):
            left, right = (x.numpy() if hasattr(x, "numpy") else x for x in (of_stock, of_ours))
            np.testing.assert_allclose(left, right, atol=1e-6)
    for cache in (stock, ours):
        _call(STATE + "fork_sequence", cache, 0, 2, 3)
        assert _call(CACHE + "get_sequence_length", cache, 2) == 3
        _call(STATE + "popn", cache, 2, 1)
        assert _call(CACHE + "get_sequence_length", cache, 2) == 2
        _call(STATE + "remove_sequence", cache, 0)
        _call(STATE + "clear", cache)
        assert _call(CACHE + "empty", cache)
    with pytest.raises(Exception, match="not a relax.vm|Mismatched type|cannot be found"):
        _call(STATE + "remove_sequence", stock, 9)


def test_rnn_states_are_forwarded():
    init = tvm.runtime.tensor(np.zeros((2, 3), "float32"))
    nothing = tvm_ffi.convert(lambda *args: None)
    pkv.use_stock_runtime()
    try:
        state = _call("vm.builtin.rnn_state_create", 1, 2, 1, [nothing], [nothing], [init])
    finally:
        pkv.use_pagedkv_runtime()

    def is_held(seq_id: int) -> bool:
        """Whether a sequence cannot be added again; one that can be is removed."""
        try:
            _call(STATE + "add_sequence", state, seq_id)
        except tvm.error.InternalError as error:
            assert f'The sequence "{seq_id}" is already in the space' in str(error)
            return True
        _call(STATE + "remove_sequence", state, seq_id)
        return False

    _call(STATE + "add_sequence", state, 4)
    assert is_held(4) and not is_held(5)
    _call(STATE + "fork_sequence", state, 4, 5, -1)
    assert is_held(5)
    _call(STATE + "remove_sequence", state, 4)
    assert not is_held(4) and is_held(5)
    _call(STATE + "clear", state)
    assert not is_held(5)


@pytest.mark.parametrize("args", [(), (None,), (1,), ("cache",), ([1],)])
@pytest.mark.parametrize("name", [STATE + "clear", STATE + "add_sequence", CACHE + "empty"])
def test_other_first_arguments_are_type_errors(name, args):
    with pytest.raises(TypeError):
        _call(name, *args)


def _positional(config, kernels):
    tagged = {name: ["tirx", kernels[name]] for name in ("prefill_ragged", "prefill", "decode")}
    return [
        Shape([4, 256, 64, 16, 0]), Shape([0, 2]), 4, 2, 16, 16, Shape([0, 0]), False, 1, 1.0, 1e4,
        0, tvm.runtime.tensor(np.zeros((), "float32")), kernels["transpose_append"], None,
        tagged["prefill_ragged"], tagged["prefill"], tagged["decode"], [], [], [], [], [],
        [kernels["merge"]], kernels["split_rotary"], kernels["copy_single_page"],
        kernels["debug_get_kv"], kernels["compact_copy"],
    ]  # fmt: skip


POSITIONAL = {
    "sizes": (0, Shape([4, 256, 64]), ValueError, "needs 5 numbers, got 3"),
    "sizes_type": (0, 4, TypeError, "argument 0"),
    "stages": (
        1,
        Shape([0, 1, 2]),
        ValueError,
        "2 pipeline stages, and this is not a Disco worker",
    ),
    "indptr": (1, Shape([0, 3]), ValueError, "layer_indptr"),
    "mla": (6, Shape([0, 1]), ValueError, "missing: transpose_append_mla, mla_prefill"),
    "linear": (6, Shape([2, 2]), ValueError, "at least one set of kernels"),
    "sliding": (6, Shape([3, 0]), ValueError, "needs a 6th number"),
    "kind": (6, Shape([0, 9]), ValueError, "unknown kind"),
    "transfer": (7, "yes", TypeError, "argument 7"),
    "rope_mode": (8, 7, ValueError, "rope_mode"),
    "rope_modes": (8, Shape([0, 1]), TypeError, "argument 8"),
    "prototype": (12, None, TypeError, "argument 12"),
    "prototype_dtype": (12, tvm.runtime.tensor(np.zeros((), "int32")), ValueError, "dtype"),
    "append": (13, None, ValueError, "missing: transpose_append"),
    "flashinfer": (22, ["flashinfer", print, print], ValueError, "FlashInfer"),
    "flashinfer_plan": (16, ["flashinfer", print, 1], TypeError, "two functions"),
    "decode": (17, [], ValueError, "missing: decode"),
    "merge": (23, None, TypeError, "argument 23"),
    "rotary": (24, ["pagedkv", print], ValueError, "has tag 'pagedkv'; known: tirx, flashinfer"),
}


@pytest.mark.parametrize("name", list(POSITIONAL))
def test_positional_errors(config, kernels, name):
    index, value, error, text = POSITIONAL[name]
    arguments = _positional(config, kernels)
    arguments[index] = value
    with pytest.raises(error, match=text):
        _call("vm.builtin.paged_attention_kv_cache_create", *arguments)
    with pytest.raises(TypeError, match="28 or 29 arguments, got 1"):
        _call("vm.builtin.paged_attention_kv_cache_create", 1)


def _attend(cache, qkv, out=None):
    cache.clear()
    cache.add_sequence(0)
    with permissive_step(cache, [0], [3]):
        return cache.attention(0, qkv, out=out).numpy()


def test_tensors_of_other_libraries():
    cache = make_cache()
    qkv = np.random.default_rng(0).standard_normal((3, 8, 8)).astype("float32")
    expected = _attend(cache, qkv)
    wide = np.zeros((3, 16, 8), "float32")
    wide[:, ::2] = qkv
    inputs = {
        "strided numpy": wide[:, ::2],
        "tvm": tvm.runtime.tensor(qkv),
        "strided tvm": tvm_ffi.from_dlpack(wide[:, ::2]),
    }
    for name, value in inputs.items():
        np.testing.assert_array_equal(_attend(cache, value), expected, err_msg=name)
    out = tvm.runtime.empty((3, 4, 8), "float32")
    _attend(cache, qkv, out)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    cache = make_cache()
    qkv = torch.randn(8, 3, 8, requires_grad=True)
    strided = qkv.transpose(0, 1)
    expected = _attend(cache, strided.detach().numpy().copy())
    np.testing.assert_array_equal(_attend(cache, strided), expected)
    rows = torch.zeros(2, 3, 2, 8)
    cache.debug_set_kv(0, 0, rows, rows)
    assert (torch.from_dlpack(cache.debug_get_kv(0)[0]) == 0).all()


def test_bfloat16_rows():
    cache = make_cache(kv_dtype="bfloat16")
    cache.add_sequence(0)
    with permissive_step(cache, [0], [5]):
        pass
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 10, 2, 8)).astype(ml_dtypes.bfloat16)[:, :, ::2]
    cache.debug_set_kv(0, 0, k, tvm.runtime.tensor(np.ascontiguousarray(v)))
    got_k, got_v = (x.numpy() for x in cache.debug_get_kv(0))
    assert got_k.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)
    part, _ = (x.numpy() for x in cache.debug_get_kv(0, 1, 3))
    np.testing.assert_array_equal(part, k[:, 1:3])


def test_all_cpus_are_used_unless_told_otherwise():
    code = "import os, tvm_pagedkv; print(os.environ['TVM_NUM_THREADS'])"
    for given, expected in ((None, len(os.sched_getaffinity(0))), ("3", 3)):
        env = {k: v for k, v in os.environ.items() if k != "TVM_NUM_THREADS"}
        if given is not None:
            env["TVM_NUM_THREADS"] = given
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert int(result.stdout) == expected


def test_another_version_of_tvm_is_refused(monkeypatch):
    from tvm_pagedkv import _library

    monkeypatch.setattr(_library.importlib.metadata, "version", lambda name: "0.25.1")
    with pytest.raises(ImportError, match="found 0.25.1; install it with: pip install"):
        _library.load()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
