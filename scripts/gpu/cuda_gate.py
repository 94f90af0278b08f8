#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Check the machine code that the compiler makes of every kernel for GPUs.

It needs nvcc and no GPU. Exits with 1 when a kernel spills, exceeds a limit of the chip or lacks
the instructions that make it fast. Floors are computed from data sheets; nothing is measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace

from cuda_floors import DATA_SHEETS, floors
from cuda_gate_rules import CHIPS, KIB, failures, resident_blocks
from cuda_machine_code import (
    INSTRUCTIONS,
    MachineCode,
    find_nvdisasm,
    machine_code,
)

import tir_kernels
from tir_kernels.catalogue import kernels_of
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.gpu.tiles.decode_tiling import DecodeTiling
from tir_kernels.gpu.tiles.tiling import Tiling
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import CudaTarget, KernelSpec
from tvm_pagedkv import KVCacheConfig, LayerSpec, RopeConfig
from tvm_pagedkv.compiler.build import kernel_spec, resolve_target
from tvm_pagedkv.compiler.cuda.build import cuda_spec
from tvm_pagedkv.compiler.cuda.families import FAMILIES, family_of
from tvm_pagedkv.compiler.cuda.source import cuda_source

_MLA = LayerSpec("mla", mla_original_qk_head_dim=192, mla_original_v_head_dim=128)
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [4 + i / 8 for i in range(64)],
    "original_max_position_embeddings": 4096,
}
_LLAMA = dict(num_qo_heads=32, num_kv_heads=8, qk_head_dim=128)
CONFIGURATIONS = {
    "llama-float16": dict(**_LLAMA, dtype="float16"),
    "llama-bfloat16": dict(**_LLAMA, dtype="bfloat16"),
    "llama-float32": dict(**_LLAMA, dtype="float32"),
    "llama-float16-pages-bfloat16": dict(**_LLAMA, dtype="float16", kv_dtype="bfloat16"),
    "heads-of-64-float16": dict(_LLAMA, qk_head_dim=64, dtype="float16"),
    "heads-of-256-bfloat16": dict(_LLAMA, qk_head_dim=256, dtype="bfloat16"),
    "heads-of-256-float32": dict(_LLAMA, qk_head_dim=256, dtype="float32"),
    "heads-of-192-and-128-bfloat16": dict(
        _LLAMA, qk_head_dim=192, v_head_dim=128, dtype="bfloat16"
    ),
    "longrope-float16": dict(**_LLAMA, dtype="float16", rope=RopeConfig(scaling=_LONGROPE)),
    "windows-cap-alibi-float16": dict(
        **_LLAMA,
        dtype="float16",
        layers=[LayerSpec("mha_sliding", 1024)],
        logit_softcap=30.0,
        alibi=True,
    ),
    "spans-float16": dict(**_LLAMA, dtype="float16", spans=True),
    "spans-windows-bfloat16": dict(
        **_LLAMA, dtype="bfloat16", layers=[LayerSpec("mha_sliding", 1024)], spans=True
    ),
    "llama-float16-pages-int8": dict(**_LLAMA, dtype="float16", kv_dtype="int8"),
    "llama-bfloat16-pages-int4": dict(**_LLAMA, dtype="bfloat16", kv_dtype="int4"),
    "windows-cap-alibi-bfloat16-pages-float8": dict(
        **_LLAMA,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
        layers=[LayerSpec("mha_sliding", 1024)],
        logit_softcap=30.0,
        alibi=True,
    ),
    "heads-of-256-float16-pages-int4": dict(
        _LLAMA, qk_head_dim=256, dtype="float16", kv_dtype="int4"
    ),
    "llama-float32-pages-int4": dict(**_LLAMA, dtype="float32", kv_dtype="int4"),
    "mla-512-64-bfloat16-pages-int8": dict(
        num_qo_heads=128,
        num_kv_heads=1,
        qk_head_dim=576,
        v_head_dim=512,
        dtype="bfloat16",
        kv_dtype="int8",
        layers=[_MLA],
    ),
    "mla-512-64-windows-bfloat16": dict(
        num_qo_heads=128,
        num_kv_heads=1,
        qk_head_dim=576,
        v_head_dim=512,
        dtype="bfloat16",
        layers=[replace(_MLA, window=1024)],
    ),
    "falcon-bfloat16-pages-float16": dict(
        num_qo_heads=71, num_kv_heads=1, qk_head_dim=64, dtype="bfloat16", kv_dtype="float16"
    ),
    "mla-512-64-bfloat16": dict(
        num_qo_heads=128,
        num_kv_heads=1,
        qk_head_dim=576,
        v_head_dim=512,
        dtype="bfloat16",
        layers=[_MLA],
    ),
}
GPU = CudaTarget()
RECURRENT = {
    "gated-delta-bfloat16": RecurrentSpec("gated_delta", 32, 16, 128, 128, "bfloat16", target=GPU),
    "gated-delta-16-bit": RecurrentSpec(
        "gated_delta", 32, 16, 128, 128, "bfloat16", target=GPU, state_dtype="bfloat16"
    ),
    "kda-bfloat16": RecurrentSpec("kda", 32, 32, 128, 128, "bfloat16", target=GPU),
    "kda-float32": RecurrentSpec("kda", 32, 32, 128, 128, "float32", target=GPU),
    "mamba2-float16": RecurrentSpec("mamba2", 48, 1, 128, 64, "float16", target=GPU),
    "lightning-256-float32": RecurrentSpec("lightning", 16, 16, 256, 256, "float32", target=GPU),
    "conv-silu-bfloat16": ConvSpec(8192, 4, "bfloat16", "silu", target=GPU),
    "conv-bias-float32": ConvSpec(2048, 3, "float32", None, True, target=GPU),
}
NAMES = (*CONFIGURATIONS, *RECURRENT)
COLUMNS = (
    *("kernel", "regs", "spilled", "stack", "shared KiB: static + dynamic / limit", "threads"),
    *("grid", "blocks/SM", "KiB ahead/SM", *INSTRUCTIONS, "instr.", "floor in us"),
)


def spec_of(name: str, arch: str = "80") -> KernelSpec | RecurrentSpec | ConvSpec:
    """The spec of a configuration's layers, for the GPUs of an architecture."""
    if name in RECURRENT:
        return replace(RECURRENT[name], target=family_of(arch))
    config = KVCacheConfig(1, **CONFIGURATIONS[name]).resolved()
    return cuda_spec(kernel_spec(config, config.layers[0], resolve_target()), arch)


@functools.cache
def source_of(name: str, functions: Sequence[str] | None = None, arch: str = "80") -> str:
    """The CUDA C++ of kernels of a configuration; None: of all, the stock cache's too."""
    spec = spec_of(name, arch)
    functions = functions or tir_kernels.kernel_names(spec, for_stock=True)
    return cuda_source(
        {function: tir_kernels.build_kernel(function, spec) for function in functions}
    )


def codes_of(
    name: str, arch: str, options: Sequence[str] = (), functions: Sequence[str] | None = None
) -> dict[str, list[MachineCode]]:
    """Return the machine code of the kernels of each function of a configuration."""
    codes: dict[str, list[MachineCode]] = {}
    family = arch if arch in FAMILIES else "80"  # others have the same source
    for code in machine_code(source_of(name, functions, family), arch, options):
        codes.setdefault(code.launch.function, []).append(code)
    return codes


def failures_of(name: str, codes: dict[str, list[MachineCode]]) -> list[str]:
    """Return what is wrong with the code of a configuration."""
    spec = spec_of(name)
    return [line for function, code in codes.items() for line in failures(function, spec, code)]


def ungated() -> list[str]:
    """Names of kernels for GPUs that no configuration has."""
    gated = {
        kernel
        for name in CONFIGURATIONS
        for kernel in tir_kernels.kernel_names(spec_of(name), for_stock=True)
    }
    attention = KernelSpec(1, 1, 64, 64, target=CudaTarget())
    return [k.name for k in kernels_of(attention) if k.name not in gated]


def ahead_bytes(code: MachineCode, spec: KernelSpec) -> int:
    """Return the bytes of K and V in flight per multiprocessor in decode; 0: other kernels.

    At the bandwidth of the data sheets and a latency of a microsecond, it takes 36 KiB on an H200.
    """
    tilings: list = []
    if code.launch.function in ("decode", "decode_sliding", "decode_windowed"):
        tilings = [*DecodeTiling.choices(spec), DecodeTiling.of(spec, is_widened=False)]
    elif code.launch.function == "mla_prefill":
        tilings = Tiling.choices(spec, spec.kv_dtype)
    for tiling in tilings:
        if tiling.num_bytes == code.launch.dynamic_bytes:
            return tiling.ahead_bytes * resident_blocks(code)
    return 0


def row(code: MachineCode, spec: KernelSpec, floor: str) -> list[str]:
    """A row of the table."""
    launch, counts = code.launch, [str(count) for count in code.counts.values()]
    shared = (code.static_bytes, launch.dynamic_bytes, CHIPS[code.arch].block_bytes)
    static, dynamic, limit = (f"{num_bytes / KIB:.4g}" for num_bytes in shared)
    ahead = f"{ahead_bytes(code, spec) / KIB:.4g}"
    grid = " x ".join("n" if n is None else str(n) for n in launch.grid).removesuffix(" x 1")
    return [
        *(launch.kernel, str(code.registers), str(code.spill_bytes), str(code.stack_bytes)),
        *(f"{static} + {dynamic} / {limit}", str(launch.threads), grid.removesuffix(" x 1")),
        *(str(resident_blocks(code)), ahead, *counts, str(code.num_instructions), floor),
    ]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(COLUMNS, *rows, strict=True)]
    for cells in (COLUMNS, *rows):
        padded = [
            f"{c:<{w}}" if i in (0, len(widths) - 1) else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())


def main() -> int:
    archs = [f"sm_{arch}" for arch in CHIPS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archs", nargs="+", default=archs, choices=archs)
    parser.add_argument("--configurations", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--max-registers", type=int, help="compile with at most N registers")
    args = parser.parse_args()
    options = []
    if args.max_registers:
        options = [f"-maxrregcount={args.max_registers}", "-override-directive-values"]
    is_sass = find_nvdisasm() is not None
    print(
        f"Instructions of {'the machine code' if is_sass else 'PTX: there is no nvdisasm'}. Floors"
    )
    for arch, sheet in DATA_SHEETS.items():
        print(
            f"  sm_{arch}: data sheet of the {sheet.name}: {sheet.bandwidth / 1e12:g} TB/s, "
            f"{sheet.tensor_rate / 1e12:g} TFLOP/s dense on tensor cores, "
            f"{sheet.float_rate / 1e12:g} in float32"
        )
    wrong = []
    for name in args.configurations:
        for arch in (arch.removeprefix("sm_") for arch in args.archs):
            codes, spec = codes_of(name, arch, options), spec_of(name, arch)
            print(f"\n{name}, sm_{arch}")
            print_table(
                [
                    row(code, spec, floors(function, spec, arch) if i == 0 else "")
                    for function, kernels in codes.items()
                    for i, code in enumerate(kernels)
                ]
            )
            found = failures_of(name, codes)
            wrong += found
            for line in found:
                print(f"FAILED: {line}")
    left_out = ungated()
    wrong += left_out
    for kernel in left_out:
        print(f"FAILED: no configuration has {kernel}")
    print(f"\n{len(wrong)} failed" if wrong else "\nall passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
