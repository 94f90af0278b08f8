# SPDX-License-Identifier: Apache-2.0
"""Every kernel is well-formed TIR, which building does not check, and private."""

import pytest
import tvm
from tvm.script import tirx as T

import tir_kernels
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.script import prim_func
from tir_kernels.spec import CudaTarget, KernelSpec, RopeSpec, VectorTarget

from ..support.harness.selections import with_slow

F32, F16, BF16 = "float32", "float16", "bfloat16"
LATENT = {"kind": "mla", "original_qk_head_dim": 48, "original_v_head_dim": 32}


def make_spec(heads, dims, dtype: str, target, **fields) -> KernelSpec:
    rope = RopeSpec(rotary_dim=0 if fields.get("kind") == "mla" else dims[0])
    return KernelSpec(*heads, *dims, dtype, dtype, page_size=16, rope=rope, target=target, **fields)


SPECS = {
    "cpu": make_spec((4, 2), (64, 64), F32, VectorTarget(lanes=8, registers=16)),
    "cpu-bf16": make_spec((4, 2), (64, 64), BF16, VectorTarget(has_bf16_dot=True)),
    "cpu-sliding": make_spec((4, 2), (64, 64), F16, VectorTarget(), kind="mha_sliding"),
    "cpu-mla": make_spec((4, 1), (80, 64), F32, VectorTarget(), **LATENT),
    "cuda": make_spec((4, 2), (64, 64), F16, CudaTarget()),
    "cuda-hopper": make_spec((4, 2), (64, 64), F16, CudaTarget("sm_90a")),
    "cuda-f32": make_spec((4, 2), (64, 64), F32, CudaTarget()),
    "cuda-sliding": make_spec((4, 2), (64, 64), BF16, CudaTarget(), kind="mha_sliding"),
    "cuda-mla": make_spec((4, 1), (80, 64), F16, CudaTarget(), **LATENT),
    "cpu-recurrent": RecurrentSpec("kda", 4, 2, 64, 64, BF16),
    "cpu-conv": ConvSpec(96, 4, F16, "silu", True),
    "cuda-recurrent": RecurrentSpec("gated_delta", 4, 2, 64, 64, F16, target=CudaTarget()),
    "cuda-conv": ConvSpec(96, 4, BF16, "silu", True, target=CudaTarget()),
}


def check(function) -> None:
    """Raise if a function is not well-formed, as `T.prim_func` does."""
    tvm.s_tir.analysis.verify_well_formed(tvm.IRModule.from_expr(function))
    if not function.attrs.get("s_tir", False):
        tvm.tirx.analysis.verify_tirx_well_formed(function)


@pytest.mark.parametrize("name", with_slow(SPECS, "cpu-bf16", "cpu-sliding", "cuda-f32"))
def test_kernels_are_well_formed(name):
    spec = SPECS[name]
    kernels = tir_kernels.kernel_names(spec, for_stock=True)
    assert len(kernels) >= 6
    for kernel in kernels:
        function = tir_kernels.build_kernel(kernel, spec)
        assert "global_symbol" not in function.attrs
        check(function)


def test_a_kernel_that_is_not_well_formed_is_noticed():
    @prim_func
    def kernel(o: T.handle):
        T.func_attr({"s_tir": True})
        buffer = T.match_buffer(o, (4,), "float32")
        T.buffer_store(buffer, T.float32(1), [tvm.tirx.Var("nowhere", "int32")])

    with pytest.raises(Exception, match="nowhere"):
        check(kernel)


if __name__ == "__main__":
    tvm.testing.main()
