# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of engines: positions for compiled code, RoPE fields without RoPE."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ..support.cases.caches.engine_calls import CACHE, STATE, call, engine_config, make_engine
from ..support.emulators.python_kernels import KERNELS, view
from ..support.emulators.stock import create_positional


def _double():
    """A Relax function of an int32 vector."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("n", "int64"),), "int32"))
    with builder.function("double", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.add(x, x)))
        builder.emit_func_output(out)
    return builder.get()["double"]


# --- positions ------------------------------------------------------------------------------------


def test_positions_for_compiled_code():
    """Functions that Relax compiles refuse tensors that do not begin at their data pointer."""
    module = tvm.IRModule({"double": _double()})
    vm = relax.VirtualMachine(tvm.compile(relax.transform.LegalizeOps()(module), "llvm"), tvm.cpu())
    cache = make_engine("ours").cache
    past = np.zeros(2, int)
    for seq_id in (0, 1):
        call(STATE + "add_sequence", cache, seq_id)
    for lengths in ([5, 3], [1, 1], [2, 9]):
        call(STATE + "begin_forward", cache, Shape([0, 1]), Shape(lengths))
        positions = call(CACHE + "get_query_positions", cache)
        expected = np.concatenate([p + np.arange(n) for p, n in zip(past, lengths, strict=True)])
        np.testing.assert_array_equal(positions.numpy(), expected)
        np.testing.assert_array_equal(vm["double"](positions).numpy(), 2 * expected)
        call(STATE + "end_forward", cache)
        past += lengths
    del cache  # the tensor keeps its memory
    np.testing.assert_array_equal(positions.numpy(), expected)


def test_kernels_of_others_get_tensors_without_an_offset():
    """Some compiled functions refuse one, and some libraries forget to add it."""
    seen = set()

    def record(name):
        def kernel(*args):
            for i, each in enumerate(args):
                if isinstance(each, tvm_ffi.Tensor):
                    assert view(each).ctypes.data == each.data_ptr(), (name, i)
                    assert each.data_ptr() % (64 if each.dtype == "int32" else 16) == 0, (name, i)
                    seen.add((name, i))
            return KERNELS[name](*args)

        return kernel

    engine = make_engine("ours", {name: record(name) for name in KERNELS})
    engine.add(0, 1, 2)
    engine.step([0, 1, 2], [5, 3, 9])
    engine.step([2, 0, 1], [1, 1, 1])
    engine.fork(0, 3)
    engine.step([3, 0], [1, 2])
    assert {name for name, _ in seen} >= {"decode", "prefill", "split_rotary", "transpose_append"}


# --- what is passed without a meaning -------------------------------------------------------------


@pytest.mark.parametrize("theta, scale", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), float("inf"))])
def test_theta_and_scale_without_a_rotation(theta, scale):
    """Models without RoPE pass -1 for theta, for example."""
    config = engine_config(rope=pkv.RopeConfig(mode="none", theta=theta, scale=scale))
    assert all(each.rope == pkv.RopeConfig(mode="none") for each in config.resolved().layers)
    for mode in ("normal", "inline"):
        with pytest.raises(ValueError, match=r"rope\.(theta|scale)"):
            pkv.RopeConfig(mode=mode, theta=theta, scale=scale)


class _Rope:
    """The fields that `create_positional` reads, unchecked."""

    def __init__(self, mode: str, theta: float, scale: float):
        self.mode, self.theta, self.scale = mode, theta, scale


@pytest.mark.parametrize("theta, scale", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), float("inf"))])
def test_the_constructors_ignore_them_as_well(theta, scale):
    engine = make_engine("ours")
    named = tvm_ffi.get_global_func("pagedkv.create")
    config = engine_config()
    nothing = tvm_ffi.convert(lambda *_: None)
    names = (
        "transpose_append prefill_ragged prefill decode merge split_rotary copy_single_page "
        "debug_get_kv compact_copy"
    ).split()
    kernels = dict.fromkeys(names, nothing)
    layer = {"kind": "mha", "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 8}
    fields = {
        "max_num_sequences": 4, "max_total_tokens": 64, "prefill_chunk_size": 32, "page_size": 4,
        "dtype": "float32", "layers": [{**layer, "rope_theta": theta, "rope_scale": scale}],
    }  # fmt: skip

    def positional(mode: str):
        object.__setattr__(config, "rope", _Rope(mode, theta, scale))
        return create_positional(config, kernels, "tirx")

    layouts = {call(CACHE + "get_layout_hash", c) for c in (positional("none"), engine.cache)}
    assert len(layouts) == 1
    cache = named({**fields, "rope_mode": 0}, kernels, tvm.cpu())
    assert cache.description["layers"][0]["rope_theta"] == 10000.0
    for mode, number in (("normal", 1), ("inline", 2)):
        with pytest.raises(ValueError, match="rope_theta and rope_scale must be positive"):
            positional(mode)
        with pytest.raises(ValueError, match="rope_theta and rope_scale must be positive"):
            named({**fields, "rope_mode": number}, kernels, tvm.cpu())


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
